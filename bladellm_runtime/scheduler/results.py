"""`ResultReader`: from what a step produced to what each request is told, and which requests end."""

from bladellm_runtime.request import FinishReason
from bladellm_runtime.scheduler.plan import StepPlan, StepResult
from bladellm_runtime.scheduler.prepared import Progress, TokenMatcher
from bladellm_runtime.scheduler.roster import Roster
from bladellm_runtime.scheduler.sequence import Sequence, State
from bladellm_runtime.wire.messages import RequestDelta, TokenLogprobs

INVALID_LOGITS = "invalid_logits"
CONSTRAINT_FAILED = "constraint_failed"
_UNUSUAL = TokenLogprobs([], [])
"""In place of no log-probabilities, for rows that are not to be read the short way."""


class ResultReader:
    """Appends sampled tokens to their sequences. Rows of a stale generation or an ended request are dropped.

    A token that ends its request (eos, stop token) is part of the delta: the front end decides what text it has. The
    token that completes a constraint has text all the same: a delta of its own, without tokens, ends that request.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._ends: list[RequestDelta] = []
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.cached_tokens = 0

    def read(self, plan: StepPlan, result: StepResult) -> list[RequestDelta]:
        """The deltas of a step, in row order; behind them the ends of requests whose constraints are complete."""
        deltas = self._read_decodes(plan, result)
        for row in range(plan.num_decode, len(plan.slots)):
            delta = self._read_chunk(plan, result, row)
            if delta is not None:
                deltas.append(delta)
        if self._ends:
            deltas += self._ends
            self._ends = []
        return deltas

    def _read_decodes(self, plan: StepPlan, result: StepResult) -> list[RequestDelta]:
        owner, add = self._roster.slots.owner, RequestDelta
        deltas: list[RequestDelta] = []
        unusual = 0
        scores = _marked(result.logprobs, plan.constrained) if plan.constrained else result.logprobs
        rows = zip(plan.slots[: plan.num_decode], plan.generations, result.tokens, scores, strict=False)
        decode = State.DECODE
        # This runs for every token: what most of them need is written out, the rest is `_accept`. A token of a sequence
        # in DECODE is not its last: more of them are still to be planned.
        for slot, generation, token, logprobs in rows:
            seq = owner[slot]
            if seq is None or seq.generation != generation:
                continue
            if token is not None and token >= 0 and logprobs is None and token not in seq.stops and seq.state is decode:
                seq.tokens.append(token)
                deltas.append(add(seq.request_id, [token]))
            else:
                unusual += 1
                deltas.append(self._accept(seq, token, None if logprobs is _UNUSUAL else logprobs))
        self.generated_tokens += len(deltas) - unusual
        return deltas

    def _read_chunk(self, plan: StepPlan, result: StepResult, row: int) -> RequestDelta | None:
        seq = self._roster.slots.find(plan.slots[row], plan.generations[row])
        if seq is None:
            return None
        seq.add_prompt_logprobs(plan.starts[row], result.prompt_logprobs[row] or [])
        first = seq.generated == 0
        if plan.samples[row]:
            delta = self._accept(seq, result.tokens[row], result.logprobs[row])
        elif plan.starts[row] + plan.query_lens[row] == seq.kv_end:
            delta = self._end(seq, RequestDelta(seq.request_id, []), FinishReason.LENGTH)
        else:
            return None
        if first:
            self._announce(seq, delta)
        return delta

    def _accept(self, seq: Sequence, token: int | None, logprobs: TokenLogprobs | None) -> RequestDelta:
        """Append a sampled token and end the sequence if it was its last."""
        matcher = seq.prepared.matcher
        if token is None or token < 0:
            if matcher is not None and matcher.only_end_left:
                # Every token is forbidden: the constraint allows an end token alone, and min_tokens holds these back.
                return self._end(seq, RequestDelta(seq.request_id, []), FinishReason.STOP)
            seq.failed = True
            return self._end(seq, RequestDelta(seq.request_id, [], error=INVALID_LOGITS), FinishReason.ERROR)
        progress = Progress.GOES_ON if matcher is None else matcher.accept(token)
        if matcher is not None and progress is Progress.FAILED:
            return self._fail(seq, matcher)
        tokens = seq.tokens
        tokens.append(token)
        self.generated_tokens += 1
        delta = RequestDelta(seq.request_id, [token])
        if logprobs is not None:
            delta.logprobs = [logprobs]
        if progress is Progress.ENDED:
            return self._end(seq, delta, FinishReason.STOP)
        if progress is Progress.COMPLETE:
            self._ends.append(self._end(seq, RequestDelta(seq.request_id, []), FinishReason.STOP))
            return delta
        if token in seq.stops and seq.generated > seq.params.min_tokens:
            return self._end(seq, delta, FinishReason.STOP)
        if len(tokens) == seq.max_len:
            return self._end(seq, delta, FinishReason.LENGTH)
        return delta

    def _fail(self, seq: Sequence, matcher: TokenMatcher) -> RequestDelta:
        delta = RequestDelta(seq.request_id, [], error=CONSTRAINT_FAILED, message=matcher.failure)
        return self._end(seq, delta, FinishReason.ERROR)

    def _announce(self, seq: Sequence, delta: RequestDelta) -> None:
        """Complete the first delta of a request."""
        delta.scheduled_at = seq.scheduled_at
        if seq.params.prompt_logprobs is not None:
            delta.prompt_logprobs = seq.prompt_logprobs
        delta.cached_tokens = min(max(seq.cached, 0), seq.prompt_len)
        self.prompt_tokens += seq.prompt_len
        self.cached_tokens += delta.cached_tokens

    def _end(self, seq: Sequence, delta: RequestDelta, finish: FinishReason) -> RequestDelta:
        delta.finish = finish
        self._roster.end(seq)
        return delta


def _marked(logprobs: list[TokenLogprobs | None], rows: list[int]) -> list[TokenLogprobs | None]:
    """The log-probabilities with these rows marked as unusual."""
    marked = list(logprobs)
    for row in rows:
        marked[row] = marked[row] or _UNUSUAL
    return marked
