"""B49: two sources that say the same are accepted; two that differ are an error with both origins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hfdist.config import resolve_settings
from hfdist.errors import ConfigError


def _deepspeed(tmp_path: Path, **content: object) -> dict[str, str]:
    """The environment of a DEEPSPEED yaml with a json."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, **content}))
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}


def _resolve(environ: dict[str, str], **kwargs: Any) -> Any:
    settings, _ = resolve_settings(accelerator_kwargs=kwargs, environ=environ)
    return settings


def test_text_and_number_agree() -> None:
    """ "8" from the launcher and 8 from the script."""
    environ = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}
    assert _resolve(environ, gradient_accumulation_steps=8).gradient_accumulation_steps == 8


@pytest.mark.parametrize(("said", "script"), [(8, 8), ("8", 8), ("auto", 8)])
def test_json_and_script_agree(tmp_path: Path, said: object, script: int) -> None:
    """A DeepSpeed json, as number, as text or "auto", and the script."""
    environ = _deepspeed(tmp_path, gradient_accumulation_steps=said)
    assert _resolve(environ, gradient_accumulation_steps=script).gradient_accumulation_steps == 8


def test_launcher_and_script_differ() -> None:
    """4 and 8: both values, both origins."""
    with pytest.raises(ConfigError) as caught:
        _resolve({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, gradient_accumulation_steps=8)
    text = str(caught.value)
    for part in ("4", "8", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "Accelerator(gradient_accumulation_steps=)"):
        assert part in text


def test_json_and_script_differ(tmp_path: Path) -> None:
    """The json is named by its path."""
    environ = _deepspeed(tmp_path, gradient_accumulation_steps=4)
    with pytest.raises(ConfigError) as caught:
        _resolve(environ, gradient_accumulation_steps=8)
    text = str(caught.value)
    for part in ("4", "8", "ds.json", "Accelerator(gradient_accumulation_steps=)"):
        assert part in text


def test_json_and_launcher_differ(tmp_path: Path) -> None:
    """Two files, no script involved."""
    environ = _deepspeed(tmp_path, gradient_accumulation_steps=4) | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}
    with pytest.raises(ConfigError) as caught:
        _resolve(environ)
    for part in ("ds.json", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "kwargs", "parts"),
    [
        (
            {"ACCELERATE_MIXED_PRECISION": "bf16"},
            {"mixed_precision": "fp16"},
            ("bf16", "fp16", "ACCELERATE_MIXED_PRECISION", "Accelerator(mixed_precision=)"),
        ),
        (
            {"ACCELERATE_GRADIENT_CLIPPING": "0.5", "HFDIST_GRADIENT_CLIPPING": "2"},
            {},
            ("0.5", "2", "ACCELERATE_GRADIENT_CLIPPING", "HFDIST_GRADIENT_CLIPPING"),
        ),
    ],
    ids=["precision", "clipping"],
)
def test_other_settings_that_differ(environ: dict[str, str], kwargs: dict[str, Any], parts: tuple[str, ...]) -> None:
    """The rule is not about accumulation alone."""
    with pytest.raises(ConfigError) as caught:
        _resolve(environ, **kwargs)
    for part in parts:
        assert part in str(caught.value)


def test_equal_clipping_from_two_sources() -> None:
    """ "1.0" and 1 are one value."""
    environ = {"ACCELERATE_GRADIENT_CLIPPING": "1.0", "HFDIST_GRADIENT_CLIPPING": "1"}
    assert _resolve(environ).gradient_clipping == 1.0
