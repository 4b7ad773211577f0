"""What the launcher knows of each node, and of each spare node."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class State(Enum):
    """The state of a node in the current attempt."""

    RUNNING = auto()  # its end is not known; or it is a spare node that is not ready yet
    DISCONNECTED = auto()  # with --lease 0: its command runs on without a connection, and is to be followed again
    WAITING = auto()  # its agent waits for the next attempt; or it is a spare node that is ready
    ENDED = auto()  # its command has ended, or was not started
    LOST = auto()  # it does not reply


# State -> states that may follow it within an attempt. A state that may not follow is ignored: reports arrive late.
NEXT = {
    State.RUNNING: {State.DISCONNECTED, State.WAITING, State.ENDED, State.LOST},
    State.DISCONNECTED: {State.RUNNING, State.ENDED, State.LOST},
    State.WAITING: {State.ENDED, State.LOST},
    State.ENDED: {State.WAITING, State.LOST},
    State.LOST: set(),
}


@dataclass
class NodeState:
    """What is known of a node. The fields below `clock` are facts of the current attempt."""

    state: State = State.ENDED
    token: str = ""  # with pdsh: what its reports contain
    clock: float | None = None  # seconds that its clock is ahead of the one here; None: it has not reported
    runs_on: bool = False  # with --lease 0: its command is known to have started
    heard: float = 0.0  # time of its last report or reply, on the clock of the loop
    reported: int | None = None  # exit code that its supervisor has reported
    unlogged: str = ""  # lines that its disk did not take
    unstarted: int | None = None  # exit code with which its supervisor could not be started
    missed: str = ""  # why another node reports it as lost
    lost: str = ""  # why it is lost
    signaled: float | None = None  # Unix time at which it reported a signal for which it stops

    @property
    def is_unended(self) -> bool:
        return self.state in (State.RUNNING, State.DISCONNECTED)

    def become(self, state: State) -> None:
        """Change the state, if it may follow the present one."""
        if state in NEXT[self.state]:
            self.state = state

    def begin_attempt(self, runs: bool) -> None:
        """Forget the facts of the last attempt. runs: it is a node of the next attempt, not a spare node."""
        state = State.RUNNING if runs else self.state
        vars(self).update(vars(NodeState(state=state, token=self.token, clock=self.clock)))


class Nodes(dict[str, NodeState]):
    """The nodes of a run by name, also spare nodes and lost nodes."""

    @property
    def unended(self) -> set[str]:
        """Nodes of the attempt whose end is not known."""
        return {name for name, known in self.items() if known.is_unended}

    @property
    def waiting(self) -> set[str]:
        """Nodes whose agent waits for the next attempt."""
        return {name for name, known in self.items() if known.state is State.WAITING}

    @property
    def disconnected(self) -> list[NodeState]:
        return [known for known in self.values() if known.state is State.DISCONNECTED]

    @property
    def lost(self) -> dict[str, str]:
        """Lost nodes of the last attempt, and the reasons."""
        return {name: known.lost for name, known in self.items() if known.lost}

    @property
    def clocks(self) -> dict[str, float]:
        """Nodes that have reported, and the seconds that their clocks are ahead of the one here."""
        return {name: known.clock for name, known in self.items() if known.clock is not None}

    @property
    def signals(self) -> dict[str, float]:
        """Nodes that report a signal for which they stop, and the Unix times of these reports."""
        return {name: known.signaled for name, known in self.items() if known.signaled is not None}
