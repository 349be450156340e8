"""What the tool that compares bits before and after a redesign says."""

from tools.bits import CASES, differences

BITS = {"state_sha256": "a", "final_loss": 1.0}


def test_thirty_jobs_with_names_of_their_own():
    assert len({case.name for case in CASES}) == len(CASES) == 30


def test_another_bit_is_told_and_so_is_a_case_that_is_not_in_both():
    before, after = {"one": BITS, "gone": BITS}, {"one": BITS | {"final_loss": 2.0}, "new": BITS}
    assert differences(before, after) == [
        "gone: was recorded, and is none any more",
        "new: was not recorded",
        "one: final_loss was 1.0, is 2.0",
    ]
    assert differences(before, dict(before)) == []
