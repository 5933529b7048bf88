"""DeepSpeed's two vocabularies -> claims, without importing deepspeed.

They are the `deepspeed_config:` section of an accelerate yaml (exported as `ACCELERATE_DEEPSPEED_*`) and DeepSpeed's
json (`deepspeed_config_file:`, or inside a `DeepSpeedPlugin`).

DeepSpeed clips at 1.0 when nobody says so; hfdist clips only when asked, and says so in a notice.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NoReturn, TypeVar

from hfdist.config import deepspeed_keys as keys
from hfdist.config.ledger import Ledger, Strength
from hfdist.config.values import is_unsaid, read_bool, read_int, read_nonnegative, read_precision
from hfdist.errors import ConfigError, nearest, say

_T = TypeVar("_T")
_FIXED_SCALE_INTERVAL = 2**31 - 1  # a growth interval no run reaches


def read_deepspeed_environment(ledger: Ledger, environ: Mapping[str, str]) -> None:
    """Claims of a DEEPSPEED yaml: its inline keys, and its json when it names one."""
    prefix = "ACCELERATE_DEEPSPEED_"
    section = [name for name in environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",") if name]
    for name in section:
        if name not in keys.YAML_SECTION:
            _unknown(name, keys.YAML_SECTION, origin="the yaml's deepspeed_config section")
    source = environ.get(prefix + "CONFIG_FILE", "none")
    stage_default = "zero_stage absent from the yaml: accelerate's default"
    if not is_unsaid(source):
        read_deepspeed_json(ledger, load_json(source), origin=_short(source), world_size=_world_size(environ))
    elif prefix + "ZERO_STAGE" not in environ:
        ledger.claim("zero_stage", 2, origin=stage_default, strength=Strength.DEFAULT)
        ledger.notice(f"{stage_default}, 2")
    ledger.claim("zero_stage", environ.get(prefix + "ZERO_STAGE"), origin=_yaml("zero_stage"))
    for part in ("optimizer", "param"):
        device = environ.get(f"{prefix}OFFLOAD_{part.upper()}_DEVICE")
        ledger.later(f"offload_{part}", device, origin=_yaml(f"offload_{part}_device"))
    ledger.claim("load_sharded", environ.get(prefix + "ZERO3_INIT"), origin=_yaml("zero3_init_flag"))
    if environ.get(prefix + "MOE_LAYER_CLS_NAMES"):
        ledger.hint("deepspeed_moe_layer_cls_names", origin="the yaml's deepspeed_config section")
    if is_unsaid(environ.get("ACCELERATE_GRADIENT_CLIPPING")) and is_unsaid(source):
        _notice_default_clip(ledger)


def load_json(source: str) -> dict[str, object]:
    """The json named by `source`: a path, the text itself, or its base64, as accelerate takes. Raises ConfigError."""
    try:
        if source.lstrip().startswith("{"):
            text = source
        elif Path(source).is_file():
            text = Path(source).read_text(encoding="utf-8")
        else:
            text = base64.urlsafe_b64decode(source).decode("utf-8")
        content = json.loads(text, object_pairs_hook=_no_duplicates)
    except (json.JSONDecodeError, UnicodeDecodeError, binascii.Error, OSError) as error:
        raise ConfigError(
            say(
                given=f"deepspeed_config_file {_short(source)!r} ({error})",
                expected="the path of a DeepSpeed json",
                do="Give an absolute path, or one relative to the directory the launch starts in.",
            )
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(
            say(given=f"{_short(source)}, a json {type(content).__name__}", expected="a json object", do="Wrap it.")
        )
    return content


def read_deepspeed_json(ledger: Ledger, content: Mapping[str, object], *, origin: str, world_size: int | None) -> None:
    """Claims of a DeepSpeed json. `world_size` (None: unknown) checks train_batch_size."""
    _walk(ledger, content, keys.TOP, path="", origin=origin)
    own = content.get("hfdist")
    if own is not None:
        for name, value in _section(own, "hfdist", origin).items():
            ledger.claim_own(name, value, origin=f'{origin}, "hfdist": {name}')
    _read_zero(ledger, content, origin=origin)
    _read_fp16(ledger, content, origin=origin)
    _read_bf16(ledger, content, origin=origin)
    _read_torch_autocast(ledger, content, origin=origin)
    _read_communication_dtype(ledger, content, origin=origin)
    _read_batch_sizes(ledger, content, origin=origin, world_size=world_size)
    for name, table in (
        ("activation_checkpointing", keys.ACTIVATION_CHECKPOINTING),
        ("data_types", keys.DATA_TYPES),
        ("checkpoint", keys.CHECKPOINT),
        ("tensor_parallel", keys.TENSOR_PARALLEL),
    ):
        if content.get(name) is not None:
            _walk(ledger, _section(content[name], name, origin), table, path=f"{name}.", origin=origin)
    for name in ("autotp_size", "tp_size"):
        size = _section(content.get("tensor_parallel") or {}, "tensor_parallel", origin).get(name)
        if not is_unsaid(size) and str(size) != "0":  # DeepSpeed's word for none
            ledger.claim("tp_size", size, origin=f"{origin}, tensor_parallel.{name}")
    for name, build in (("optimizer", "torch.optim.AdamW(model.parameters(), ...)"), ("scheduler", "a scheduler")):
        if content.get(name):
            ledger.refuse(
                f"a section {name!r}",
                origin=origin,
                why=f"the script to build its {name}",
                do=f"Remove the section and build {build} in the script, instead of accelerate's Dummy"
                f"{'Optim' if name == 'optimizer' else 'Scheduler'}.",
            )
    if is_unsaid(content.get("gradient_clipping")):
        _notice_default_clip(ledger)


def _walk(
    ledger: Ledger, content: Mapping[str, object], table: Mapping[str, keys.Rule], *, path: str, origin: str
) -> None:
    """Apply `table` to each key of one section; keys with code of their own are left to it."""
    for key, value in content.items():
        rule = table.get(key)
        if rule is None:
            _unknown(path + key, [path + known for known in table], origin=origin)
        if is_unsaid(value):
            continue
        if isinstance(rule, keys.Honoured):
            ledger.claim(rule.name, value, origin=f"{origin}, {path}{key}")
        elif isinstance(rule, keys.Hint):
            ledger.hint(path + key, origin=origin)
        elif isinstance(rule, keys.Later):
            active = any(not is_unsaid(v) for v in value.values()) if isinstance(value, dict) else True
            if active:
                ledger.later(rule.name, value, origin=f"{origin}, {path}{key}")
        elif isinstance(rule, keys.Refused) and not _is_harmless(value, rule):
            ledger.refuse(f"{path}{key} = {value!r}", origin=origin, why=rule.why, do=rule.do)


def _is_harmless(value: object, rule: keys.Refused) -> bool:
    if isinstance(value, dict):
        switch = value.get("enabled", value.get("enable"))
        return not value or (switch is not None and not read_bool(switch))
    return str(value).strip().lower() in rule.harmless


def _read_zero(ledger: Ledger, content: Mapping[str, object], *, origin: str) -> None:
    if content.get("zero_optimization") is None:
        if "zero_stage" not in ledger.claims:
            raise ConfigError(
                say(
                    given=f"{origin} without zero_optimization",
                    expected="a stage, as accelerate asks for",
                    do='Add "zero_optimization": {"stage": 0} (or 1, 2, 3).',
                )
            )
        return
    zero = _section(content["zero_optimization"], "zero_optimization", origin)
    _walk(ledger, zero, keys.ZERO, path="zero_optimization.", origin=origin)
    if "stage" not in zero:
        ledger.claim(
            "zero_stage", 0, origin=f"{origin} without a stage: DeepSpeed's default", strength=Strength.DEFAULT
        )
    elif is_unsaid(zero["stage"]):
        ledger.claim(
            "zero_stage", 2, origin=f'{origin}, stage "auto": accelerate\'s default', strength=Strength.DEFAULT
        )
    _read_zero_plus_plus(ledger, zero, origin=origin)
    for name, known in (("offload_optimizer", keys.OFFLOAD_OPTIMIZER), ("offload_param", keys.OFFLOAD_PARAM)):
        if zero.get(name) is None:
            continue
        offload = _section(zero[name], f"zero_optimization.{name}", origin)
        for key in offload:
            if key not in known:
                _unknown(
                    f"zero_optimization.{name}.{key}", [f"zero_optimization.{name}.{k}" for k in known], origin=origin
                )
        ledger.later(name, offload.get("device"), origin=f"{origin}, zero_optimization.{name}.device")


def _read_zero_plus_plus(ledger: Ledger, zero: Mapping[str, object], *, origin: str) -> None:
    """ZeRO++'s weights as int8 and its groups of ranks; 1 and false, DeepSpeed's defaults, ask for nothing."""
    quantized, group = zero.get("zero_quantized_weights"), zero.get("zero_hpz_partition_size")
    where = f"{origin}, zero_optimization."
    if not is_unsaid(quantized) and _number(read_bool, quantized, f"{where}zero_quantized_weights"):
        ledger.claim("gather_dtype", "int8", origin=f"{where}zero_quantized_weights")
    if not is_unsaid(group) and _number(read_int, group, f"{where}zero_hpz_partition_size") != 1:
        ledger.claim("secondary_shard_size", group, origin=f"{where}zero_hpz_partition_size")


def _read_fp16(ledger: Ledger, content: Mapping[str, object], *, origin: str) -> None:
    """The fp16 section. Keys it leaves out take DeepSpeed's defaults, not hfdist's: the json is its language."""
    if content.get("fp16") is None:
        return
    section = _section(content["fp16"], "fp16", origin)
    _walk(ledger, dict.fromkeys(section), keys.FP16, path="fp16.", origin=origin)  # names only
    if not _precision_on(ledger, "fp16", section.get("enabled", False), origin=f"{origin}, fp16.enabled"):
        return
    scale = section.get("loss_scale", 0)
    fixed = 0.0 if is_unsaid(scale) else _number(read_nonnegative, scale, f"fp16.loss_scale ({origin})")
    if fixed > 0:
        rest = {key: value for key, value in section.items() if key not in keys.FP16_DEFAULTS}
        _walk(ledger, rest, keys.FP16, path="fp16.", origin=origin)
        for setting, value in (("init_scale", fixed), ("min_scale", fixed), ("growth_interval", _FIXED_SCALE_INTERVAL)):
            ledger.claim(setting, value, origin=f"{origin}, fp16.loss_scale")
        ledger.notice(f"{origin}, fp16.loss_scale = {fixed:g}: a fixed scale; an overflow stops training with an error")
        return
    _walk(ledger, section, keys.FP16, path="fp16.", origin=origin)
    for key, default in keys.FP16_DEFAULTS.items():
        rule = keys.FP16[key]
        if is_unsaid(section.get(key)) and isinstance(rule, keys.Honoured):
            named = f"DeepSpeed's default of fp16.{key}"
            ledger.claim(rule.name, default, origin=named, strength=Strength.DEFAULT)
    power = section.get("initial_scale_power")
    said = not is_unsaid(power)
    exponent = _number(
        read_int, power if said else keys.FP16_DEFAULTS["initial_scale_power"], f"fp16.initial_scale_power ({origin})"
    )
    ledger.claim(
        "init_scale",
        2.0**exponent,
        origin=f"{origin}, fp16.initial_scale_power",
        strength=Strength.SAID if said else Strength.DEFAULT,
    )
    consecutive = section.get("consecutive_hysteresis", False)
    if (is_unsaid(consecutive) or not read_bool(consecutive)) and ledger.value("hysteresis") != 1:
        ledger.notice(f"{origin}: fp16.hysteresis counts overflows in a row (consecutive_hysteresis = true)")


def _precision_on(ledger: Ledger, dtype: str, enabled: object, *, origin: str) -> bool:
    """Claims what a section's `enabled` says; True when `dtype` is the precision of this run. "auto" follows others."""
    if is_unsaid(enabled):
        return ledger.value("mixed_precision", "no") == dtype
    if _number(read_bool, enabled, origin):
        ledger.claim("mixed_precision", dtype, origin=origin)
        return True
    ledger.exclude("mixed_precision", dtype, origin=origin)
    return False


def _read_bf16(ledger: Ledger, content: Mapping[str, object], *, origin: str) -> None:
    for name in ("bf16", "bfloat16"):
        if content.get(name) is None:
            continue
        section = _section(content[name], name, origin)
        on = _precision_on(ledger, "bf16", section.get("enabled", False), origin=f"{origin}, {name}.enabled")
        _walk(ledger, section if on else dict.fromkeys(section), keys.BF16, path=f"{name}.", origin=origin)


def _read_torch_autocast(ledger: Ledger, content: Mapping[str, object], *, origin: str) -> None:
    if content.get("torch_autocast") is None:
        return
    section = _section(content["torch_autocast"], "torch_autocast", origin)
    _walk(ledger, section, keys.TORCH_AUTOCAST, path="torch_autocast.", origin=origin)
    if is_unsaid(section.get("enabled")) or not read_bool(section["enabled"]):
        return
    ledger.claim("mixed_precision", section.get("dtype", "bf16"), origin=f"{origin}, torch_autocast.dtype")
    ledger.claim("compute", "autocast", origin=f"{origin}, torch_autocast.enabled")


def _read_communication_dtype(ledger: Ledger, content: Mapping[str, object], *, origin: str) -> None:
    value = content.get("communication_data_type")
    if is_unsaid(value):
        return
    claim_reduce_dtype(ledger, value, origin=f"{origin}, communication_data_type")


def claim_reduce_dtype(ledger: Ledger, dtype: object, *, origin: str) -> None:
    """Gradients reduced in `dtype`: fp32, bf16 or the compute dtype (claimed before); anything else is an error."""
    try:
        wanted = read_precision(dtype)
    except ValueError as error:
        raise ConfigError(
            say(given=f"{dtype!r} from {origin}", expected=f"a dtype, {error}", do="Remove it to reduce in fp32.")
        ) from None
    if wanted == "no":
        ledger.claim("reduce_dtype", "fp32", origin=origin)
    elif wanted == ledger.value("mixed_precision", "no"):
        ledger.claim("reduce_dtype", "compute", origin=origin)
    elif wanted == "bf16":
        ledger.claim("reduce_dtype", "bf16", origin=origin)
    else:
        ledger.refuse(
            f"gradient reductions in {wanted}",
            origin=origin,
            why=f"fp32, bf16 or the compute dtype ({ledger.value('mixed_precision', 'no')})",
            do="Remove it, or set mixed_precision to the same dtype.",
        )


def _read_batch_sizes(ledger: Ledger, content: Mapping[str, object], *, origin: str, world_size: int | None) -> None:
    """DeepSpeed's train_batch_size = micro x accumulation x ranks: fills accumulation in, or is checked."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu")
    total, micro = (
        None if is_unsaid(content.get(name)) else _number(read_int, content[name], f"{name} ({origin})")
        for name in names
    )
    for name, size in zip(names, (total, micro), strict=True):
        if size is not None and size < 1:
            ledger.refuse(f"{name} = {size}", origin=origin, why="a batch of 1 or more", do="Correct or remove it.")
        if size is not None:
            ledger.notice(f"{origin}: {name} = {size} is only checked; the batch size is the data loader's")
    if total is None or micro is None or world_size is None:
        return
    steps = ledger.value("gradient_accumulation_steps")
    if "gradient_accumulation_steps" not in content and steps is None and total % (micro * world_size) == 0:
        ledger.claim(
            "gradient_accumulation_steps",
            total // (micro * world_size),
            origin=f"{origin}, train_batch_size / (train_micro_batch_size_per_gpu x {world_size} processes)",
        )
        return
    if total != micro * int(steps or 1) * world_size:  # type: ignore[call-overload]
        ledger.refuse(
            f"train_batch_size = {total}",
            origin=origin,
            why=f"{micro} per rank x {steps or 1} accumulation steps x {world_size} processes",
            do='Correct one of them, or write "auto".',
        )


def _notice_default_clip(ledger: Ledger) -> None:
    if "gradient_clipping" not in ledger.claims:
        ledger.notice(
            "gradient_clipping absent: nothing is clipped (DeepSpeed and accelerate would clip at 1.0; "
            "write gradient_clipping: 1.0 to clip, 0 to have native DeepSpeed clip nothing)"
        )


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(
            say(given=f"{', '.join(twice)} twice in one json object", expected="each key once", do="Keep one of them.")
        )
    return content


def _section(value: object, name: str, origin: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(
            say(given=f"{name} = {value!r} from {origin}", expected="a json object", do=f'Write "{name}": {{...}}.')
        )
    return value


def _number(read: Callable[[object], _T], value: object, what: str) -> _T:
    try:
        return read(value)
    except ValueError as error:
        raise ConfigError(say(given=f"{what} = {value!r}", expected=str(error), do="Correct it.")) from None


def _unknown(name: str, known: Iterable[str], *, origin: str) -> NoReturn:
    raise ConfigError(
        say(
            given=f"the unknown key {name!r} in {origin}",
            expected="a key DeepSpeed or accelerate has",
            do=f"Correct the name{nearest(name, known)} or remove it.",
        )
    )


def _yaml(key: str) -> str:
    return f"the yaml's deepspeed_config, {key}"


def _short(source: str) -> str:
    return source if len(source) <= 120 else f"{source[:60]}..."


def _world_size(environ: Mapping[str, str]) -> int | None:
    return int(environ["WORLD_SIZE"]) if environ.get("WORLD_SIZE", "").isdigit() else None
