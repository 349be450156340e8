"""What is kept of Gloo's error messages."""

from __future__ import annotations

import pytest

from holdfast.runtime.transport.gloo import _first_sentence

LONG = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:10657: Connection "
    "reset by peer. This is typically caused by a remote worker hanging. GLHF! \N{BEACH WITH UMBRELLA}"
)


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        (LONG, "Read error [127.0.0.1]:10657: Connection reset by peer"),
        (LONG + "\nframe #0", "Read error [127.0.0.1]:10657: Connection reset by peer"),
        ("Timed out waiting 1000ms for recv", "Timed out waiting 1000ms for recv"),
        ("", "RuntimeError"),
    ],
)
def test_what_happened_is_kept_and_the_rest_is_not(message, kept):
    assert _first_sentence(RuntimeError(message)) == kept
