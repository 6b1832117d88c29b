"""The import arrows, read from the source: which folder may import which, who may reach Ray and torch. Function-level imports count."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# folder -> folders of ours that it may import; protocol is everybody's.
ARROWS: dict[str, set[str]] = {
    "protocol": set(),
    "transport": set(),
    "kvstore": {"transport"},
    "engine": {"kvstore", "transport"},
    "prefill_worker": {"engine", "kvstore", "transport"},
    "decode_worker": {"engine", "kvstore", "transport"},
    "worker": {"prefill_worker", "decode_worker", "engine", "kvstore", "transport"},
    "router": {"kvstore", "engine"},
    "cluster": {"router", "worker", "engine", "kvstore", "transport"},
    "bench": {"cli", "cluster", "router", "worker", "prefill_worker", "decode_worker", "engine", "kvstore", "transport"},
    "cli": {"bench", "cluster", "router", "worker", "engine", "kvstore", "transport"},
}
TORCH = {"torch", "transformers", "safetensors", "accelerate", "headrace_native", "nixl", "xgrammar"}


def parse_imports(source: str, package: str = "") -> set[str]:
    """Every module that the source may import, with the names that may be modules of a package."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, [package, node.module])) if node.level else node.module or ""
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
            found |= {argument.value for argument in node.args if isinstance(argument, ast.Constant) and isinstance(argument.value, str)}
    return found


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of ours."""
    found = {}
    for folder in ARROWS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


@cache
def imports_of(module: str) -> frozenset[str]:
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return frozenset(parse_imports(path.read_text(), package))


def reached_from(module: str) -> dict[str, str]:
    """Every module of ours and of others that importing `module` may load -> the module that imports it."""
    reached = {module: ""}
    waiting = [module]
    while waiting:
        current = waiting.pop()
        parents = [".".join(current.split(".")[:end]) for end in range(1, current.count(".") + 1)]
        for name in [*imports_of(current), *parents] if current in modules() else []:
            if name not in reached:
                reached[name] = current
                waiting.append(name)
    return reached


def chain(reached: dict[str, str], name: str) -> str:
    steps = [name]
    while reached[steps[-1]]:
        steps.append(reached[steps[-1]])
    return " <- ".join(steps)


def test_every_folder_with_code_is_listed() -> None:
    with_code = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert with_code <= set(ARROWS)
    assert {"protocol", "transport", "kvstore", "engine", "router", "worker", "cluster", "cli"} <= {name.split(".")[0] for name in modules()}


@pytest.mark.parametrize("folder", ARROWS)
def test_imports_point_one_way(folder: str) -> None:
    allowed = ARROWS[folder] | {folder, "protocol"}
    wrong = {
        f"{module} imports {name}"
        for module in modules()
        if module.split(".")[0] == folder
        for name in imports_of(module)
        if name.split(".")[0] in ARROWS and name.split(".")[0] not in allowed
    }
    assert not wrong


@pytest.mark.parametrize("folder", sorted(set(ARROWS) - {"cluster"}))
def test_only_cluster_imports_ray(folder: str) -> None:
    assert not {module for module in modules() if module.split(".")[0] == folder and any(name.split(".")[0] == "ray" for name in imports_of(module))}


@pytest.mark.parametrize("folder", ["protocol", "router", "cluster"])
def test_torch_is_out_of_reach(folder: str) -> None:
    """Through our own modules, however deep. What a table of strings names is loaded in the process that runs it, and does not count."""
    wrong = set()
    for module in (module for module in modules() if module.split(".")[0] == folder):
        reached = reached_from(module)
        wrong |= {chain(reached, name) for name in reached if name.split(".")[0] in TORCH}
    assert not wrong


def test_the_router_never_reaches_ray() -> None:
    for module in (module for module in modules() if module.split(".")[0] == "router"):
        reached = reached_from(module)
        assert not {chain(reached, name) for name in reached if name.split(".")[0] in ("ray", "cluster")}


def test_the_environment_is_read_in_cli_alone() -> None:
    """transport.nixl sets UCX_* before it imports nixl; cluster hands the environment on to the processes it starts and confines their threads."""
    exempt = {"transport.nixl", "transport.nixl_agent", "cluster.local", "cluster.actors"}
    found = set()
    for module, path in modules().items():
        if module.split(".")[0] not in ("cli", "bench") and module not in exempt:
            names = {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
            found |= {f"{module}: {name}" for name in names & {"os.environ", "os.getenv", "os.environb"}}
    assert not found


def test_the_reader_sees_what_it_must() -> None:
    source = "def f():\n    from a.b import c\n    import d\n    importlib.import_module('e.f')\nfrom . import g\n"
    assert {"a.b", "a.b.c", "d", "e.f", "here.g"} <= parse_imports(source, "here")
