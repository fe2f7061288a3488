"""How many prompts fit side by side: told by the engine, which is tried, not by arithmetic alone."""

from benchmarks.papers.batch_max.methods import CONTROL_RULE, EVICT_EVERY, EXTREME_DECODES, Method, batch_max
from benchmarks.papers.batch_max.run import Prompts
from winnow.errors import CapacityError, ConfigError
from winnow.llm import LLM

# The paper tried multiples of 128, and of 64 at the end.
KV_STEP = 64


class Room:
    """The KV memory of one engine, asked with the longest prompts there are.

    Args:
        llm: its steps must have room for all tokens that a batch brings at once.
        prompts: longest first.
    """

    def __init__(self, llm: LLM, prompts: Prompts, new_tokens: int) -> None:
        self._llm = llm
        self._prompts = prompts
        self._new_tokens = new_tokens

    def holds(self, batch: int, method: Method) -> bool:
        """Whether the engine takes `batch` prompts into one step, with room for all that their prompts will hold.

        It promises that room when it lets them in.
        """
        prompts = [self._prompts[number % len(self._prompts)] for number in range(batch)]
        params = method.params(self._new_tokens, to_the_end=True)
        ids: list[str] = []
        try:
            for prompt in prompts:
                ids.append(self._llm.submit(list(prompt), params))
            self._llm.step()
            return self._llm.stats().num_waiting == 0
        except CapacityError:
            return False
        finally:
            for request_id in ids:
                self._llm.abort(request_id)

    def first_batch_out_of_memory(self) -> int:
        """The paper's b0: the smallest batch that ED cannot hold.

        Raises:
            ConfigError: not even one prompt fits.
        """
        batch = 1
        while self.holds(batch, EXTREME_DECODES[0]):
            batch += 1
        if batch == 1:
            raise ConfigError(
                f"kv_memory must hold at least one prompt of {len(self._prompts[0])} tokens beside its answer"
            )
        return batch

    def most_kvs(self, batch: int) -> int | None:
        """The largest |kv|, a multiple of 64 below the longest prompt, at which Batch-Max holds `batch` prompts.

        By whatever rule: rows of all of them are equally long. None: there is no |kv| that leaves a KV behind.
        """
        stats = self._llm.stats()
        bytes_each = (stats.kv_bytes_budget - stats.kv_bytes_used) // batch
        kvs = (len(self._prompts[0]) - 1) // KV_STEP * KV_STEP
        while kvs > EVICT_EVERY and (
            self._llm.kv_bytes(kvs) > bytes_each or not self.holds(batch, batch_max(CONTROL_RULE, kvs))
        ):
            kvs -= KV_STEP
        return kvs if kvs > EVICT_EVERY else None
