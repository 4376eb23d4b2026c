"""`ResultReader`: from what a step produced to what each request is told, and which requests end."""

from bladellm_runtime.request import FinishReason
from bladellm_runtime.scheduler.plan import StepPlan, StepResult
from bladellm_runtime.scheduler.prepared import Progress, TokenMatcher
from bladellm_runtime.scheduler.roster import Roster
from bladellm_runtime.scheduler.sequence import Sequence
from bladellm_runtime.wire.messages import Delta, RequestDelta, TokenLogprobs

INVALID_LOGITS = "invalid_logits"
CONSTRAINT_FAILED = "constraint_failed"


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

    def read(self, plan: StepPlan, result: StepResult) -> list[Delta]:
        """The deltas of a step; behind them the ends of requests whose constraints are complete."""
        deltas = self._read_decodes(plan, result)
        for row in range(plan.num_decode, len(plan.slots)):
            delta = self._read_chunk(plan, result, row)
            if delta is not None:
                deltas.append(delta)
        if self._ends:
            deltas += self._ends
            self._ends = []
        return deltas

    def _read_decodes(self, plan: StepPlan, result: StepResult) -> list[Delta]:
        count, rows = plan.num_decode, (plan.slots, plan.generations, result.tokens)
        if plan.has_prompts:
            rows = (plan.slots[:count], plan.generations[:count], result.tokens[:count])
        taken, others = self._roster.log.take(*rows)
        deltas: list[Delta] = []
        if taken is not None:
            deltas.append(taken)
            self.generated_tokens += count - len(others)
        for row in others:
            seq = self._roster.slots.owner_of(plan, row)
            if seq is not None:
                deltas.append(self._accept(seq, int(result.tokens[row]), result.logprobs.get(row)))
        return deltas

    def _read_chunk(self, plan: StepPlan, result: StepResult, row: int) -> RequestDelta | None:
        seq = self._roster.slots.owner_of(plan, row)
        if seq is None:
            return None
        seq.add_prompt_logprobs(int(plan.starts[row]), result.prompt_logprobs.get(row, []))
        first = seq.generated == 0
        if plan.samples[row]:
            delta = self._accept(seq, int(result.tokens[row]), result.logprobs.get(row))
        elif plan.starts[row] + plan.query_lens[row] == seq.kv_end:
            delta = self._end(seq, RequestDelta(seq.request_id, []), FinishReason.LENGTH)
        else:
            return None
        if first:
            self._announce(seq, delta)
        return delta

    def _accept(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> RequestDelta:
        """Append a sampled token and end the sequence if it was its last."""
        matcher = seq.prepared.matcher
        if token < 0:
            if matcher is not None and matcher.only_end_left:
                # Every token is forbidden: the constraint allows but some that end the answer, and min_tokens holds
                # these back.
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
