"""From a configuration to a padded engine ready to run."""

from collections.abc import Callable

from winnow.config import EngineConfig
from winnow.models import PlainModel
from winnow.padded.admission import PaddedAdmission
from winnow.padded.engine import PaddedEngine
from winnow.padded.executor import PaddedExecutor
from winnow.padded.groups import Grouping
from winnow.padded.model import PaddedModel
from winnow.padded.modes import MODES
from winnow.padded.room import Room
from winnow.padded.seats import Seats
from winnow.padded.shape import probe_shape
from winnow.padded.trial import check_padding
from winnow.sampling import Sampler

# Waiting queries that are looked at for a group, for each one that may be in it.
_LOOKAHEAD = 8


def open_padded_engine(loaded: PlainModel, config: EngineConfig, clock: Callable[[], float]) -> PaddedEngine:
    """Set up the padded engine around a model.

    Raises:
        UnsupportedModelError: the model keeps something other than keys and values by token, or padding changes what
            it computes.
    """
    padded, scheduler = config.padded, config.scheduler
    model = PaddedModel(loaded.model)
    shape = probe_shape(loaded.model)
    check_padding(model, shape, loaded.vocab_size)
    room = Room(
        shape,
        config.cache.kv_memory,
        scheduler.max_num_seqs,
        padded.park_above,
        padded.admit_below,
    )
    sampler = Sampler(
        scheduler.max_num_seqs,
        loaded.vocab_size,
        loaded.device,
        loaded.eos_token_ids,
        seed=config.model.seed,
    )
    executor = PaddedExecutor(
        model,
        MODES[padded.padded_mode],
        room,
        Grouping(
            padded.prefill_group,
            padded.group_padding,
            scheduler.max_num_batched_tokens,
            padded.prefill_group * _LOOKAHEAD,
        ),
        Seats(sampler, scheduler.max_num_seqs),
        clock,
        # A model that is not told positions takes them from columns, of which it may know only so many.
        None if model.takes_positions else loaded.max_model_len,
        scheduler.prefill_chunk,
    )
    return PaddedEngine(
        executor,
        loaded.tokenizer,
        loaded.eos_token_ids,
        PaddedAdmission(room, loaded.vocab_size, loaded.max_model_len),
        clock,
    )
