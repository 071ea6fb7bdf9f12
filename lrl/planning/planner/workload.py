"""The work of one optimizer step: prompts and responses, or episodes."""

from dataclasses import dataclass

from lrl.planning.planner.episodes import Episodes
from lrl.planning.planner.quantiles import Quantiles
from lrl.training.tree_cost import cheapest_trees


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts and responses of one optimizer step."""

    prompts: int
    """Groups."""
    responses: int
    """Responses to each prompt."""
    prompt_tokens: int
    """Tokens of every prompt."""
    lengths: Quantiles
    """Tokens of the responses; of whole episodes, if there are `episodes`."""
    episodes: Episodes | None = None
    """None for responses of a single turn."""
    attention_tokens: int = 0
    """See `lrl.training.tree_cost`; 0 if each response carries its own prompt through training."""

    def __post_init__(self) -> None:
        for name in ("prompts", "responses", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1."
                )

    @property
    def samples(self) -> int:
        """Responses of the step."""
        return self.prompts * self.responses

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence (prompt and response)."""
        return self.prompt_tokens + int(self.lengths.longest)

    @property
    def trees(self) -> int:
        """Trees of a prompt in training, each of which reads the prompt once."""
        if not self.attention_tokens or self.prompt_tokens < 2:
            return self.responses
        return cheapest_trees(
            self.responses, self.prompt_tokens - 1, self._branches, self.attention_tokens
        )

    @property
    def _branches(self) -> float:
        """Tokens of all responses to a prompt, each with the prompt's last token."""
        return self.responses * (1 + self.lengths.mean)

    @property
    def tokens(self) -> float:
        """Tokens to train, prompts included."""
        if self.trees < self.responses:
            return self.prompts * (self.trees * (self.prompt_tokens - 1) + self._branches)
        return self.samples * (self.prompt_tokens + self.lengths.mean)

    @property
    def tokens_squared(self) -> float:
        """Sum of the squared lengths of the rows to train, without padding."""
        prompt = self.prompt_tokens
        if self.trees < self.responses:
            length = prompt - 1 + self._branches / self.trees
            return self.prompts * self.trees * length**2
        return self.samples * (
            prompt**2 + 2 * prompt * self.lengths.mean + self.lengths.mean_square
        )

    @property
    def live_tokens(self) -> float:
        """Mean context (prompt and response so far) of an unfinished response at a random
        moment."""
        return self.prompt_tokens + self.lengths.written

    @property
    def written_share(self) -> float:
        """Share of a response's tokens that a generator writes."""
        return 1.0 if self.episodes is None else self.episodes.written_share

    @property
    def read_tokens(self) -> float:
        """Mean tokens of a response that a generator reads after its prompt."""
        return 0.0 if self.episodes is None else self.episodes.read_tokens

    @property
    def tool_s(self) -> float:
        """Mean seconds in which a response waits for an environment."""
        return 0.0 if self.episodes is None else self.episodes.tool_s

    @property
    def longest_tool_s(self) -> float:
        """The most such seconds."""
        return 0.0 if self.episodes is None else self.episodes.longest_tool_s
