"""B28: 5 layers over 2 and 4 stages, every layer once under its global name; 3 layers on 4 stages: an error at once."""

from __future__ import annotations

import pytest

from tests.parity.pipelines import Spec, make_batch, pipeline_of
from tests.pool import Pools


def _names(layers: int, split: object) -> tuple[tuple[str, ...], float]:
    model = Spec(layers=layers).build()
    pipeline = pipeline_of(model, schedule="gpipe", num_micro_batches=2, split=split)
    return pipeline.applied.names, model(**make_batch(4, 5)).loss.item()


@pytest.mark.parametrize(("pp", "split"), [(2, "auto"), (4, "auto"), (2, [1, 4]), (4, [2, 1, 1, 1])])
def test_five_layers(pool: Pools, pp: int, split: object) -> None:
    want = {name for name, _ in Spec(layers=5).build().named_parameters()}
    ranks = pool(pp).run(_names, 5, split)
    names = [name for kept, _ in ranks for name in kept]
    assert len(names) == len(set(names))
    assert set(names) == want
    loss = Spec(layers=5).build()(**make_batch(4, 5)).loss.item()
    assert [value for _, value in ranks] == pytest.approx([loss] * pp, rel=1e-10)


def _refused(layers: int) -> str:
    from hfdist.errors import ConfigError

    with pytest.raises(ConfigError) as error:
        pipeline_of(Spec(layers=layers).build(), schedule="gpipe", num_micro_batches=2)
    return str(error.value)


def test_three_layers_on_four_stages(pool: Pools) -> None:
    texts = pool(4).run(_refused, 3)
    assert len(set(texts)) == 1
    assert "3 blocks for 4 pipeline stages" in texts[0]
