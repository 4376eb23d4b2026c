"""A front end's place among those of its server."""

from dataclasses import dataclass, field
from pathlib import Path

from bladellm_runtime.errors import UserError
from bladellm_runtime.server.shared_counts import SharedCounts
from bladellm_runtime.server.shared_readings import SharedReadings

ADAPTERS = "adapters"


@dataclass(frozen=True)
class Place:
    """Number `number` of `front_ends`, counted from 0. The first starts the engine and the others, and ends them."""

    number: int = 0
    front_ends: int = 1
    counts: SharedCounts = field(default_factory=SharedCounts)
    readings: SharedReadings | None = None
    """Where front ends tell each other what they have counted; None for the only one."""
    adapters: Path | None = None
    """Where they tell each other which adapters were given names; None for the only one."""

    @classmethod
    def first(cls, folder: Path, front_ends: int) -> "Place":
        """The first front end's, in a new folder."""
        counts = SharedCounts.create(folder / "counts", front_ends)
        return cls(0, front_ends, counts, SharedReadings(folder, 0, front_ends), folder / ADAPTERS)

    @classmethod
    def other(cls, folder: Path, number: int, front_ends: int) -> "Place":
        """Another one's, in the folder that the first has made. Raises `UserError` when somebody has removed it."""
        try:
            counts = SharedCounts(folder / "counts", number, front_ends)
        except OSError as error:
            raise UserError(
                f"what the front ends share is not in {folder} any more ({error.strerror}); start the server again"
            ) from error
        return cls(number, front_ends, counts, SharedReadings(folder, number, front_ends), folder / ADAPTERS)
