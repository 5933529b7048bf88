"""B25: ragged micro-batches. Batch 8 with m = 3, batch 6 with m = 4: gradients right, or one early error everywhere."""

from __future__ import annotations

import pytest

from tests.cases.test_b24 import assert_equal_to_one_process, batch, build, gradients
from tests.parity.pipelines import Spec, make_batch, pipeline_of, train_one_process, train_pipeline
from tests.parity.test_pipeline import assert_parity
from tests.pool import Pools


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"])
@pytest.mark.parametrize(("rows", "number"), [(8, 3), (6, 4), (1, 2), (5, 2)])
def test_token_labels(pool: Pools, schedule: str, rows: int, number: int) -> None:
    spec = Spec("llama", layers=5)
    windows = [[make_batch(rows, 7, "right", seed=seed)] for seed in range(5)]
    got = pool(2).run(train_pipeline, spec, windows, {"schedule": schedule, "num_micro_batches": number})
    assert_parity(got, train_one_process(spec, windows))


def _refused(rows: int, number: int) -> str:
    from hfdist.errors import ConfigError

    model = build(4)
    pipeline_of(model, schedule="1f1b", num_micro_batches=number, example=batch(2))
    with pytest.raises(ConfigError) as error:
        model(**batch(rows))
    return str(error.value)


@pytest.mark.parametrize(("rows", "number"), [(8, 3), (6, 4)])
def test_real_valued_labels_are_refused_on_all_ranks(pool: Pools, rows: int, number: int) -> None:
    """A row more would change their mean."""
    texts = pool(2).run(_refused, rows, number)
    assert len(set(texts)) == 1
    assert "multiple of num_micro_batches" in texts[0]


def test_real_valued_labels_that_divide(pool: Pools) -> None:
    assert_equal_to_one_process(pool(2).run(gradients, "1f1b", 3, 6, 5), 6, 5)
