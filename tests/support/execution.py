"""Reference interpreter of schedules that defines exactness: token by token on explicit paths, without the planner."""

from collections import Counter
from itertools import product

from dta_compile.plan import Anchor, Attach, Backward, Forward, Pop, Restore, rectangles


class Tokens:
    """Tokens of a batch by number; sequences that share a prefix share its numbers (unless `share` is false).

    Attributes:
        paths: token numbers of every sequence.
        above: for every token, the other tokens that it attends to, from the root.
        below: for every token, the tokens that attend to it, ascending.
    """

    def __init__(self, sequences, share=True):
        numbers = {}
        self.paths = [
            [
                numbers.setdefault((0 if share else s, *tokens[:stop]), len(numbers))
                for stop in range(1, len(tokens) + 1)
            ]
            for s, tokens in enumerate(sequences)
        ]
        self.above = {token: path[:depth] for path in self.paths for depth, token in enumerate(path)}
        self.below = {token: [] for token in self.above}
        for token in sorted(self.above):
            for reader in self.above[token]:
                self.below[reader].append(token)

    def of(self, part):
        assert 0 <= part.sequence < len(self.paths)
        path = self.paths[part.sequence]
        assert 0 <= part.start < part.stop <= len(path)
        return path[part.start : part.stop]


def check_attention(tokens, chunk, parts):
    """Check that squares and rectangles cover each tree pair inside a chunk once, and that its prefix is the rest."""
    inside = [token for part in chunk.slices for token in tokens.of(part)]
    number = {token: k for k, token in enumerate(inside)}
    pairs = [(q, k) for part in parts for q in range(part.first, part.last) for k in range(part.first, q + 1)]
    for r in rectangles(parts):
        pairs += product(range(r.query_first, r.query_last), range(r.key_first, r.key_last))
    expected = {(number[q], number[k]): 1 for q in inside for k in (q, *tokens.above[q]) if k in number}
    assert Counter(pairs) == Counter(expected)
    for token in inside:
        assert [key for key in tokens.above[token] if key not in number] == tokens.above[token][: chunk.start]


def execute(sequences, schedule, share=True, states=False):
    """Run a schedule like the runtime; fail if a token misses KV, an output, a loss or a gradient.

    KV gradients wait on the stack by depth. A token attends to all tokens above it, so it must have received one
    gradient from each token below it when it goes backward. With `states`, chunks must also find the running state of
    exactly the tokens above them, in both directions. Returns the execution with its counts of states.
    """
    run = _Execution(Tokens(sequences, share), states)
    for op in schedule.ops:
        run.step(op)
    assert not run.stack and not run.live
    assert run.attached == set(range(len(sequences)))
    assert run.done == (set() if schedule.mode == "score" else set(run.tokens.above))
    assert not run.states and not run.waiting_states
    return run


class _Execution:
    def __init__(self, tokens, has_states):
        self.tokens, self.has_states = tokens, has_states
        self.states = {}  # depth -> (tokens it covers, run that made it)
        self.kept_states = {}  # first token of a spine -> states kept for it
        self.waiting_states = set()  # depths
        self.most_states = self.most_state_gradients = 0
        self.runs = 0
        self.stack = []  # token whose KV is at each depth
        self.waiting = {}  # depth -> [(token, token that sent it a gradient), ...]
        self.live, self.kept = set(), {}
        self.written, self.attached, self.done = set(), set(), set()

    def step(self, op):
        match op:
            case Anchor(chunk) | Forward(chunk):
                self.forward(op, chunk)
            case Backward(chunk):
                self.backward(chunk)
            case Attach(sequences):
                for sequence in sequences:
                    assert sequence not in self.attached and self.written.issuperset(self.tokens.paths[sequence])
                    self.attached.add(sequence)
            case Restore(part):
                *_, spine = (spine for spine in self.kept.values() if _covers(spine, part, self.tokens))
                self.push(part)
                states = self.kept_states[self.tokens.of(spine)[0]]
                self.states.update({d: state for d, state in states.items() if part.start < d <= part.stop})
            case Pop(part):
                assert self.tokens.of(part) == self.stack[part.start :]
                self.cut(part.start, [])
        self.count_states()

    def count_states(self):
        alive = {*self.states.values(), *(state for kept in self.kept_states.values() for state in kept.values())}
        self.most_states = max(self.most_states, len(alive))
        self.most_state_gradients = max(self.most_state_gradients, len(self.waiting_states))

    def push(self, part):
        assert self.stack[: part.start] == self.tokens.paths[part.sequence][: part.start]
        self.cut(part.start, self.tokens.of(part))

    def cut(self, depth, then):
        """Replace the stack from `depth` on by `then`; pending gradients must belong to tokens that remain on it."""
        self.stack[depth:] = then
        self.states = {at: state for at, state in self.states.items() if at <= depth}
        for at, gradients in self.waiting.items():
            assert all(self.stack[at : at + 1] == [token] for token, _ in gradients)

    def read(self, chunk):
        """Return the tokens of a chunk; each must find the tokens above it on the stack or earlier in the chunk."""
        inside = []
        if self.has_states and chunk.start:
            assert self.states[chunk.start][0] == tuple(self.tokens.paths[chunk.slices[0].sequence][: chunk.start])
        for token in (token for part in chunk.slices for token in self.tokens.of(part)):
            above = self.tokens.above[token]
            assert self.stack[: chunk.start] == above[: chunk.start]
            assert token not in inside and set(inside).issuperset(above[chunk.start :])
            inside.append(token)
        return inside

    def forward(self, op, chunk):
        inside = self.read(chunk)
        if chunk.spine is not None:
            self.push(chunk.spine)
        self.runs += 1
        states = {depth: (tuple(self.stack[:depth]), self.runs) for depth in op.states}
        self.states.update(states)
        if isinstance(op, Forward):
            assert chunk not in self.live
            self.live.add(chunk)
        if chunk.spine is not None and (isinstance(op, Forward) or op.kv):
            self.count_states()  # including those about to be replaced
            self.kept[chunk] = chunk.spine
            self.kept_states[inside[0]] = states
        self.written.update(inside if op.out else [])

    def backward(self, chunk):
        inside = self.read(chunk)
        assert chunk in self.live
        self.live.remove(chunk)
        self.kept.pop(chunk, None)
        if chunk.start:
            self.waiting_states.add(chunk.start)
        self.count_states()
        if chunk.spine is not None:
            self.kept_states.pop(inside[0], None)
            self.waiting_states -= set(range(chunk.spine.start + 1, chunk.spine.stop + 1))
        received = {token: [] for token in inside}
        for token in inside:
            for reader in received.keys() & self.tokens.above[token]:
                received[reader].append(token)
        if chunk.spine is not None:
            for depth in range(chunk.spine.start, chunk.spine.stop):
                for token, giver in self.waiting.pop(depth, []):
                    assert token in received, "another token's gradient"
                    received[token].append(giver)
        for token, givers in received.items():
            assert token not in self.done and sorted(givers) == self.tokens.below[token]
            assert all(s in self.attached for s, path in enumerate(self.tokens.paths) if token in path)
        self.done.update(inside)
        for depth, reader in enumerate(self.stack[: chunk.start]):
            self.waiting.setdefault(depth, []).extend((reader, token) for token in inside)


def _covers(spine, part, tokens):
    inside = spine.start <= part.start and part.stop <= spine.stop
    return inside and tokens.of(spine)[part.start - spine.start : part.stop - spine.start] == tokens.of(part)
