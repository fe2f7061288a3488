"""Which blocks of the pool are free, and how many holders each of the others has."""

import torch
from torch import Tensor


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free. The scheduler asks first, so a user never sees this."""


class BlockAllocator:
    """A stack of free block ids in one tensor, and a reference count per block.

    Taking or returning n blocks is one slice and one scatter, O(n): no loop over blocks, no scan of the pool.
    How many are free is known on the host at all times, so that a step can be planned without asking the device.
    """

    def __init__(self, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        # The tail of the stack is handed out first, in ascending runs: neighbours in the pool read faster.
        self._stack = torch.arange(num_blocks, dtype=torch.int32, device=device)
        self.ref_count = torch.zeros(num_blocks, dtype=torch.int32, device=device)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def nbytes(self) -> int:
        return self._stack.nbytes + self.ref_count.nbytes

    def allocate(self, n: int) -> Tensor:
        """Take n blocks, each with one holder. Returns their ids, int32 [n].

        Raises:
            OutOfBlocksError: fewer than n are free; nothing is taken.
        """
        if n > self.num_free:
            raise OutOfBlocksError(f"{n} blocks asked for, {self.num_free} of {self.num_blocks} free")
        blocks = self._stack[self.num_free - n : self.num_free].clone()
        self.num_free -= n
        self.ref_count[blocks] = 1
        return blocks

    def share(self, blocks: Tensor) -> None:
        """Add one holder to each of `blocks`, int32 [n], distinct and in use."""
        self.ref_count[blocks] += 1

    def release(self, blocks: Tensor, *, exclusive: bool = False) -> None:
        """Take one holder from each of `blocks`, int32 [n], distinct; those without a holder become free.

        `exclusive` promises that each has one holder. Then their number is known without reading the counts back
        from the device; otherwise this waits for the device.
        """
        self.ref_count[blocks] -= 1
        freed = blocks if exclusive else blocks[self.ref_count[blocks] == 0]
        n = len(freed)
        self._stack[self.num_free : self.num_free + n] = freed
        self.num_free += n

    def check_integrity(self, holders: Tensor) -> None:
        """Assert that every block is either free or counted once per holder.

        `holders`, int64 [num_blocks]: how many table entries name each block.
        """
        free = self._stack[: self.num_free].long()
        assert len(torch.unique(free)) == self.num_free, "a block is free twice"
        assert bool((self.ref_count[free] == 0).all()), "a free block has a holder"
        assert torch.equal(self.ref_count.long(), holders), "reference counts differ from the tables"
        assert self.num_free + int((holders > 0).sum()) == self.num_blocks, "a block is neither free nor held"
