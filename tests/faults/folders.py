"""Model folders that must be refused."""

import pytest

from bladellm_runtime.errors import CheckpointError
from tests.models.harness import load_tiny


def refusal(folder, *names, longest=float("inf")):
    """Load the folder, which must fail with one sentence that holds all `names`, below `longest` characters; returns
    the sentence."""
    with pytest.raises(CheckpointError) as caught:
        load_tiny(folder)
    message = str(caught.value)
    for name in names:
        assert str(name) in message, message
    assert "\n" not in message
    assert len(message) < longest
    return message
