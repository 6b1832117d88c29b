"""`headrace bench NAME ...`: one row for each measurement; the modules in bench/ own their arguments."""

import runpy
import sys

import typer

BENCHES = {
    "transport": ("bench.transport", "Bytes per second between two processes, for each transport."),
    "store": ("bench.store", "Blocks per second through a node store."),
    "attention": ("bench.attention", "The native attention kernel against torch."),
    "scheduling": ("bench.engine_scheduling", "What scheduling gives and what it costs."),
    "interference": ("bench.interference", "How much arriving prompts slow running answers, colocated and disaggregated."),
    "vllm": ("bench.vllm", "Side by side with vLLM on this machine."),
    "structured": ("bench.structured", "Valid answers, the cost of masks, and the passes that forced tokens save."),
    "engine": ("bench.engine", "Steps as fractions of what this machine can read and multiply."),
    "quality": ("bench.quality", "Perplexity of each weight format."),
    "idle": ("bench.idle", "What an idle cluster costs."),
}

app = typer.Typer(no_args_is_help=True, help="Measurements; each prints its figures and one line of JSON.")

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _add(name: str, module: str, words: str) -> None:
    def run(context: typer.Context) -> None:
        sys.argv = [f"headrace bench {name}", *context.args]
        runpy.run_module(module, run_name="__main__")

    app.command(name, help=words, context_settings=_PASS_ON)(run)


for _name, (_module, _words) in BENCHES.items():
    _add(_name, _module, _words)
