"""`import hfdist` costs next to nothing beside `import accelerate`, and needs nothing that only Linux has."""

from __future__ import annotations

import subprocess
import sys

_PACKAGES = "torch accelerate transformers deepspeed datasets matplotlib rich typer yaml psutil numpy"


def _python(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=120)


def _imported_us(module: str) -> int:
    """Microseconds that importing `module` took, all it imports included, by `-X importtime`."""
    result = _python(f"import {module}", "-X", "importtime")
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.split("|")[-1].strip() == module]
    return int(lines[-1].split("|")[1])


def test_importing_hfdist_adds_at_most_15_percent_to_importing_accelerate():
    assert _imported_us("hfdist") <= 0.15 * _imported_us("accelerate")


def test_importing_hfdist_and_its_config_imports_nothing_heavy():
    for module in ("hfdist", "hfdist.config", "hfdist.launch", "hfdist.run", "hfdist.plugins"):
        result = _python(
            f"import sys, {module}\nprint([name for name in '{_PACKAGES}'.split() if name in sys.modules])"
        )
        assert (result.returncode, result.stdout.strip()) == (0, "[]"), (module, result.stdout, result.stderr)


def test_every_module_imports_without_proc_namespaces_and_o_direct():
    """As on macOS: opening anything under /proc fails, and os has no unshare, setns or O_DIRECT."""
    code = """
import builtins, io, os, pkgutil, sys
for name in ("unshare", "setns", "O_DIRECT", "CLONE_NEWNET", "sched_getaffinity"):
    if hasattr(os, name):
        delattr(os, name)
import torch, accelerate, transformers  # what they need of the machine is their own affair
real_open, real_os_open = io.open, os.open
def refuse(opener):
    def guarded(path, *args, **kwargs):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(path)
        return opener(path, *args, **kwargs)
    return guarded
builtins.open = io.open = refuse(real_open)
os.open = refuse(real_os_open)
import hfdist
names = [m.name for m in pkgutil.walk_packages(hfdist.__path__, "hfdist.") if m.name != "hfdist.run"]
for name in names:
    __import__(name)
print(len(names))
"""
    result = _python(code)
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout.split()[-1]) > 20
