"""Every rule is run: real op, real slices, forward and backward."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers.integrations.moe")  # it defines transformers::grouped_mm_fallback

from autopar.ops import registered_targets
from tests.ops.flash_stand_in import define_ops
from tests.ops.harness import Sample, check_options
from tests.ops.samples import all_samples

define_ops()
SAMPLES = all_samples()


@pytest.mark.parametrize("case", SAMPLES, ids=[f"{i}-{case.target}" for i, case in enumerate(SAMPLES)])
def test_every_option_computes_what_the_whole_op_computes(case: Sample):
    assert check_options(case) >= 2


def test_every_registered_target_has_a_sample():
    ours = {target for target in registered_targets() if not target.startswith("testlib.")}
    assert ours - {case.target for case in SAMPLES} == set()
