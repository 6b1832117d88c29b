"""The `headrace` command: arguments, words and exit codes. Owns no work of its own; every command imports what it needs when it runs, so that help is fast.

Exit codes: 0 done, 1 failed, 2 refused before anything started.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from cli import bench
from protocol.errors import ConfigError, HeadraceError, InvalidRequest

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="A disaggregated prefill/decode serving cluster.")
models = typer.Typer(no_args_is_help=True, help="Models on this machine.")
app.add_typer(models, name="model")
app.add_typer(bench.app, name="bench")

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="The cluster's file; see examples/.")]
Settings = Annotated[list[str] | None, typer.Option("--set", "-s", metavar="A.B=VALUE", help="Change one field of the file; may be given often.")]

_EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LOCAL = _EXAMPLES / "local.yaml"


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out.print(f"headrace {metadata.version('headrace')}")
        raise typer.Exit


@app.command()
def serve(config: ConfigFile = LOCAL, settings: Settings = None) -> None:
    """Keep a cluster up until Ctrl-C or SIGTERM, which drains and cleans up."""
    from cli.progress import Stages
    from cluster.local import Cluster

    parsed = _load(config, settings)
    with _signals_raise(), Stages(err) as stages:
        cluster = Cluster(parsed, progress=stages.update)
        err.print(f"logs: {cluster.log_folder}", soft_wrap=True)
        try:
            cluster.start()
            stages.close()
            out.print(f"serving {parsed.model_name} at {cluster.url}")
            out.print(
                f"""ask: curl {cluster.url}/v1/chat/completions -H 'content-type: application/json' """
                f"""-d '{{"model": "{parsed.model_name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'""",
                soft_wrap=True,
            )
            code = cluster.wait()
            err.print(f"the cluster ended by itself with {code}; see {cluster.log_folder}")
            raise typer.Exit(1)
        except KeyboardInterrupt:
            stages.close()
            err.print("stopping: running requests may finish")
        finally:
            cluster.stop()
    err.print("stopped")


@app.command()
def demo(config: ConfigFile = LOCAL, settings: Settings = None, question: str = "What is the capital of France?") -> None:
    """Start a cluster, ask one question, show where the time went and what moved, stop everything."""
    from cli.demo import run

    with _signals_raise():
        raise typer.Exit(run(_load(config, ["router.http_port=0", *(settings or [])]), question, out, err))


@app.command()
def status(
    url: Annotated[str, typer.Option(help="The router's address.")] = "http://127.0.0.1:8000",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Renew until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Workers, load, cache and transfers of a running cluster."""
    from cli.status import show

    with contextlib.suppress(KeyboardInterrupt):
        show(url, watch, interval, out)


@models.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="A known name, a GGUF file, a Hugging Face folder or a hub name.")],
    cache_dir: Annotated[Path, typer.Option(help="Where models and logs are kept.")] = Path("~/.cache/headrace"),
) -> None:
    """Bring a model to this machine and convert it; nothing is done twice."""
    from cli.progress import Stages
    from engine.checkpoint import resolve, revision

    with Stages(err) as stages:
        folder = resolve(name, cache_dir.expanduser() / "models", stages.update)
    out.print(f"{name} revision {revision(folder)}: {folder}", soft_wrap=True)


def _load(path: Path, settings: list[str] | None) -> "HeadraceConfig":  # type: ignore[name-defined]  # noqa: F821
    from cli.config import load_config

    return load_config(path, settings or [])


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does; a second one while it cleans up is not heard."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for other in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> None:
    started = time.monotonic()
    try:
        app()
    except (ConfigError, InvalidRequest) as error:
        err.print(f"headrace: {error.message}", soft_wrap=True, markup=False)
        sys.exit(2)
    except HeadraceError as error:
        err.print(f"headrace: {error.message} ({error.code} after {time.monotonic() - started:.0f} s)", soft_wrap=True, markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
