"""Constraints in the engine core without a model: when masks come, what happens when anything goes wrong meanwhile."""

import itertools
import random
import shutil
import threading
import time

import pytest

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine import build
from bladellm_runtime.engine.build import build_engine
from bladellm_runtime.engine.core import EngineCore
from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.guided.backend import MatcherError
from bladellm_runtime.guided.backends import load_vocabulary
from bladellm_runtime.guided.fsm.backend import FsmBackend
from bladellm_runtime.guided.vocabulary import Vocabulary, allowed_tokens
from bladellm_runtime.request import FinishReason, SamplingParams
from bladellm_runtime.wire.messages import AddRequest, one_by_one
from tests.engine.masked_runner import (
    VOCABULARY,
    Ended,
    Step,
    drain,
    expected,
    make_core,
    make_requests,
    regex,
    step_until,
)
from tests.guided.samples import END
from tests.support.cases import some_pairs


@pytest.mark.parametrize(("micro_batches", "granules"), some_pairs([1, 2, 3], [64, 18]))
@pytest.mark.parametrize("overlap", [True, False])
def test_matchers_and_tokens_stay_in_step(fsm, overlap, micro_batches, granules):
    """Few requests too: then one micro-batch alone has something to run."""
    rng = random.Random()
    for count in (1, 2, 30):
        requests = make_requests(count, rng)
        core = make_core(fsm, overlap=overlap, micro_batches=micro_batches, granules=granules)
        found = drain(core, requests)
        assert found == {request.request_id: expected(request, fsm) for request in requests}
        core.close()


@pytest.mark.parametrize("what", ["launch", "sample", "collect"])
@pytest.mark.parametrize("overlap", [True, False])
def test_row_40_steps_without_a_result_leave_matchers_where_they_were(fsm, overlap, what):
    """Memory runs out at random, also while a step waits for its masks."""
    rng = random.Random()
    failing = set(itertools.accumulate(rng.randrange(3, 20) for _ in range(100)))
    requests = make_requests(30, rng, share=0.9)
    core = make_core(fsm, overlap=overlap, fails=lambda plan, now: now == what and plan.step in failing)
    found = drain(core, requests)
    ended = {number for number, delta in found.deltas.items() if delta.error}
    assert {found.deltas[number].error for number in ended} <= {"out_of_memory"}
    for request in requests:
        wanted = expected(request, fsm)
        tokens = found[request.request_id]
        assert tokens == (wanted[: len(tokens)] if request.request_id in ended else wanted)
    assert core._runner.failures > 0
    core.close()


def test_aborts_between_steps(fsm):
    rng = random.Random()
    requests, core, found = make_requests(60, rng), make_core(fsm, granules=18), Ended()
    waiting, aborted = list(requests), set()
    while waiting or not core.idle:
        if waiting and rng.random() < 0.7:
            found.take(core.add(waiting.pop(0)))
        found.take(one_by_one(core.step()))
        live = [number for number in range(60 - len(waiting)) if number not in found.deltas]
        if live and rng.random() < 0.2:
            victim = rng.choice(live)
            aborted.add(victim)
            found.take(core.abort([victim]))
    for request in requests:
        wanted, tokens = expected(request, fsm), found[request.request_id]
        assert tokens == (wanted[: len(tokens)] if request.request_id in aborted else wanted)
    assert core._constraints._given == core._constraints._compiling == {}
    core.close()


def test_row_29_a_dead_end_ends_its_request_alone():
    """The vocabulary has no token for what must follow; and a token that is not allowed comes from nowhere."""
    pieces = list(VOCABULARY.pieces)
    pieces[10 + ord("z")] = b""
    backend = FsmBackend(Vocabulary(tuple(pieces), VOCABULARY.end_ids))
    rng = random.Random()
    for overlap in (True, False):
        core = make_core(backend, overlap=overlap)
        dead = AddRequest(100, [1, 2], SamplingParams(max_tokens=9), 0, 0.0, "", regex("[ab]{3}z"))
        others = make_requests(8, rng)
        found = drain(core, [*others[:4], dead, *others[4:]])
        delta = found.deltas[100]
        assert (delta.finish, delta.error) == (FinishReason.ERROR, "constraint_failed")
        assert delta.message == "guided_regex could not be followed to the end of the answer: no token can follow"
        assert "".join(VOCABULARY.pieces[token].decode() for token in found[100]) in (
            "".join(letters) for letters in itertools.product("ab", repeat=3)
        )
        assert {key: found[key] for key in found if key != 100} == {
            request.request_id: expected(request, backend) for request in others
        }
        core._runner.obeys = False
        found = drain(core, [AddRequest(101, [5], SamplingParams(max_tokens=9), 0, 0.0, "", regex("[ab]{3}"))])
        assert found.deltas[101].error == "constraint_failed"
        assert "is not allowed here" in found.deltas[101].message
        core.close()


class Fragile:
    """A matcher that fails at the third token."""

    def __init__(self, matcher) -> None:
        self.matcher, self.accepted = matcher, 0
        self.fill_mask = matcher.fill_mask

    @property
    def is_done(self) -> bool:
        return self.matcher.is_done

    def accept(self, token: int) -> bool:
        self.accepted += 1
        if self.accepted == 3:
            raise MatcherError("the step is too expensive")
        return self.matcher.accept(token)


class FragileBackend(FsmBackend):
    """Its matchers fail."""

    def compile(self, constraint, deadline):
        compiled = super().compile(constraint, deadline)
        make = compiled.matcher
        compiled.matcher = lambda: Fragile(make())
        return compiled


def test_a_matcher_that_fails_ends_its_request_alone():
    core = make_core(FragileBackend(VOCABULARY))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    found = drain(core, [
        AddRequest(1, [4, 5], params, 0, 0.0, "", regex("a{9}")), AddRequest(2, [4, 5], params, 0, 0.0),
    ])  # fmt: skip
    assert len(found[1]) == 2
    assert found.deltas[1].error == "constraint_failed"
    assert "too expensive" in found.deltas[1].message
    assert len(found[2]) == 20
    core.close()


def test_a_constraint_that_failed_is_compiled_anew():
    core = make_core(FragileBackend(VOCABULARY))
    params = SamplingParams(max_tokens=20)
    for turn in range(3):
        lasting = AddRequest(1, [4, 5], params, 0, 0.0, "", regex("ab"))
        found = drain(core, [AddRequest(0, [4, 5], params, 0, 0.0, "", regex("a{9}")), lasting])
        assert (found.deltas[0].error, found.deltas[1].error) == ("constraint_failed", None)
        stats = core.stats(time.monotonic())
        assert (stats.guided_misses, stats.guided_hits) == (2 + turn, turn)
    core.close()


def test_the_vocabulary_is_read_before_requests_are_served(demo_model, monkeypatch):
    """Native code would keep every stream waiting when the first constraint comes."""
    made = []
    monkeypatch.setattr(build, "load_vocabulary", lambda *given: made.append(given) or load_vocabulary(*given))
    engine = build_engine(EngineArgs(str(demo_model), dtype="float32", device="cpu", kv_cache_gib=0.02))
    assert len(made) == 1
    assert "read vocabulary" in dict(engine.ready.phases)
    assert engine.core._constraints.begin().done()
    found = drain(engine.core, [AddRequest(0, [40], SamplingParams(max_tokens=9), 0, 0.0, "", regex("a"))])
    assert (found.deltas[0].finish, len(made)) == (FinishReason.STOP, 1)
    engine.core.close()


class SlowBackend(FsmBackend):
    """Compiles patterns that begin with `slow` once `go` is set."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.go, self.begun = threading.Event(), threading.Event()

    def compile(self, constraint, deadline):
        if constraint.source.startswith("slow"):
            self.begun.set()
            assert self.go.wait(60)
        return super().compile(constraint, deadline)


def test_others_go_on_while_a_constraint_is_compiled_and_those_that_wait_can_be_aborted():
    backend, rng, found = SlowBackend(), random.Random(), Ended()
    core = make_core(backend)
    params = SamplingParams(max_tokens=9)
    for number in (100, 101, 102):
        found.take(core.add(AddRequest(number, [3, 4], params, 0, 0.0, "", regex("slow[ab]"))))
    step_until(core, found, backend.begun.is_set)
    others = make_requests(20, rng)
    for request in others:
        found.take(core.add(request))
    step_until(core, found, lambda: len(found.deltas) == 20)
    assert found == {request.request_id: expected(request, backend) for request in others}
    step_until(core, found, lambda: core.preparing)
    found.take(core.abort([101]))
    assert found.deltas[101].finish is FinishReason.ABORT
    backend.go.set()
    step_until(core, found, lambda: core.idle)
    assert found.deltas[101].finish is FinishReason.ABORT
    wanted = expected(AddRequest(0, [3, 4], params, 0, 0.0, "", regex("slow[ab]")), backend)
    assert found[100] == found[102] == wanted
    assert core._constraints._given == core._constraints._compiling == {}
    core.close()


def test_a_constraint_that_takes_too_long_is_refused_and_others_are_not():
    backend = SlowBackend()
    core = make_core(backend, deadline=1.0)
    found = drain(core, [
        AddRequest(1, [3], SamplingParams(max_tokens=9), 0, 0.0, "", regex("slow")),
        AddRequest(2, [3], SamplingParams(max_tokens=9), 0, 0.0, "", regex("[ab]")),
        AddRequest(3, [3], SamplingParams(max_tokens=9), 0, 0.0, "", regex("(a")),
    ])  # fmt: skip
    backend.go.set()
    assert found.deltas[1].error == found.deltas[3].error == "constraint_refused"
    assert found.deltas[1].message == "guided_regex took more than 1 s to compile; simplify it"
    assert found.deltas[2].finish is FinishReason.STOP
    stats = core.stats(time.monotonic())
    assert (stats.guided_refused, stats.guided_misses) == (2, 3)
    core.close()


def test_min_tokens_does_not_hold_back_the_end_of_a_text_that_is_complete(fsm):
    """Where the mask has an end token alone, all logits are -inf: the request ends, and is no invalid one."""

    def hold_back(core: EngineCore) -> None:
        token = core._runner.token

        def sampled(step: Step, row: int, mask) -> int:
            held = mask is not None and allowed_tokens(mask).max() <= END
            return -1 if held else token(step, row, mask)

        core._runner.token = sampled

    # The automaton knows that x is all; of the longer text it does not, for there is no token for what could follow.
    pieces = list(VOCABULARY.pieces)
    pieces[10 + ord("z")] = b""
    for backend, pattern in ((fsm, "x"), (FsmBackend(Vocabulary(tuple(pieces), VOCABULARY.end_ids)), "xz?")):
        core = make_core(backend)
        hold_back(core)
        params = SamplingParams(max_tokens=9, min_tokens=5)
        found = drain(core, [AddRequest(1, [3], params, 0, 0.0, "", regex(pattern))])
        assert found[1] == [10 + ord("x")]
        assert (found.deltas[1].finish, found.deltas[1].error) == (FinishReason.STOP, None)
        core.close()


def test_a_model_without_a_tokenizer_refuses_constraints_and_serves_the_rest(demo_model, tmp_path):
    shutil.copytree(demo_model, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    args = {"dtype": "float32", "device": "cpu", "kv_cache_gib": 0.02, "model": str(tmp_path / "model")}
    engine = build_engine(EngineArgs(**args))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    found = drain(engine.core, [
        AddRequest(1, [40], params, 0, 0.0, "", regex("a")), AddRequest(2, [40], params, 0, 0.0),
    ])  # fmt: skip
    assert found.deltas[1].error == "constraint_refused"
    assert found.deltas[1].message == (
        "guided_regex cannot be used: there is no tokenizer here that says what text each token is"
    )
    assert (len(found[2]), found.deltas[2].finish) == (4, FinishReason.LENGTH)
    engine.core.close()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        build_engine(EngineArgs(**args, enable_json_warmup=True))


def test_tokens_that_the_tokenizer_does_not_have_are_never_allowed(demo_model, tmp_path):
    """A model padded beyond its tokenizer, whose padding would win."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(demo_model, folder)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"vocab_size": 8192', '"vocab_size": 8231'))
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.cat([embedding, embedding[200:239] * 100])
    save_file(tensors, folder / "model.safetensors")
    engine = build_engine(EngineArgs(str(folder), dtype="float32", device="cpu", kv_cache_gib=0.02))
    requests = [
        AddRequest(number, [40 + number], SamplingParams(max_tokens=20, temperature=0.0), 0, 0.0, "", constraint)
        for number, constraint in enumerate([regex(".*"), regex(".+"), None, None])
    ]
    found = drain(engine.core, requests)
    assert all(token < 8192 for number in (0, 1) for token in found[number])
    assert any(token >= 8192 for number in (2, 3) for token in found[number])
    engine.core.close()
