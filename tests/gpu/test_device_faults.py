"""Rows 40 and 41 of the fault table with the faults themselves: no memory left on the GPU, and a kernel that stores
where nothing is. The engine runs in a process of its own, whose context is the one that is lost."""

import pytest

from tests.engine import reference
from tests.faults.conftest import assert_quiet
from tests.faults.test_device_faults import ask_beside, assert_ends, faulty, text_of
from tests.faults.test_engine import ask, expected
from tests.support.faulty_engine import TRIGGER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
]
GRAPHS = pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])


@pytest.mark.whole_gpu
@GRAPHS
@pytest.mark.parametrize("arena", ["cuda", "relocating"])
def test_row_40_no_memory_left_beside_the_engine(demo_model, graphs, arena):
    """Activations of the prompt's one step, 3,900 × 1,024 floats and more, do not fit into what is left; those of
    smaller steps do, or lie in the memory of graphs."""
    prompt = [TRIGGER, *(400 + index % 3000 for index in range(3899))]
    flags = {"disable_cuda_graph": not graphs, "kv_arena": arena, "kv_cache_gib": 0.25, "target_tbt_ms": 0}
    with faulty("hog", "cuda", **flags) as server:
        status, answer = ask_beside(server, demo_model, prompt)
        assert status == 200, answer
        assert answer["choices"][0]["text"] == text_of(demo_model, prompt, 8)
        assert "out of memory in a step of" in server.log()
        assert "Traceback" not in server.log()
        assert_quiet(server)
        assert server.json("/health")[0] == 200
        assert ask(server, reference.PROMPTS[0])[1]["choices"][0]["text"] == expected(demo_model, reference.PROMPTS[0])


@GRAPHS
@pytest.mark.parametrize("overlap", [True, False])
def test_row_41_an_illegal_store(graphs, overlap):
    with faulty("store", "cuda", disable_cuda_graph=not graphs, disable_overlap=not overlap) as server:
        assert_ends(server, "the engine stopped: the GPU failed (")
