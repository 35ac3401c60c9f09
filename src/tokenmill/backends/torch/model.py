"""`TorchModel`: a loaded model, its weights once for any number of backends.

`BaseTorchModel` is what it shares with the models that run through transformers (`transformers_adapter.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tokenmill.backends.families.names import in_file
from tokenmill.backends.torch.attention import rows_are_independent
from tokenmill.backends.torch.backend import AnyDecoder, DenseBackend, TorchBackend
from tokenmill.backends.torch.decoder import Decoder
from tokenmill.backends.torch.footprint import free_bytes, plan
from tokenmill.backends.torch.kv_storage import TorchKV
from tokenmill.contract import BackendLimits, Capabilities, ModelInfo, StepSizes
from tokenmill.contract.backend import KV_SHARE, MemoryPlan
from tokenmill.errors import ConfigError, InvalidOperation
from tokenmill.kv.paged import PagedKV
from tokenmill.kv.paged_backend import BLOCK_SIZE, WeightsGate

NUM_THREADS = torch.get_num_threads()
"""What torch would take by itself, before any backend has told it otherwise."""


class ModelDecoder(AnyDecoder, Protocol):
    """What a model must know of its decoder."""

    @property
    def kv_dtype(self) -> torch.dtype: ...

    @property
    def names(self) -> list[str]:
        """The decoder's own names of its tensors."""
        ...

    @property
    def about(self) -> str:
        """How the weights are held, for people."""
        ...

    @property
    def inv_freq(self) -> Tensor:
        """What keys were rotated by, so that they can be shifted; empty where that is not known."""
        ...

    def replace(self, own: str, value: Tensor) -> None: ...


class BaseTorchModel(ABC):
    """A `ModelHandle` over paged KV. `own_names`: what the model's files call a tensor -> what its decoder does."""

    default_block_size = BLOCK_SIZE
    step_sizes = StepSizes(max_step_ms=500.0)
    default_depth = 0
    """Submitting ahead hides the host's work behind a device's; on the CPU both are the same processor."""

    def __init__(
        self,
        name: str,
        decoder: ModelDecoder,
        own_names: Mapping[str, str],
        path: Path | None,
        *,
        form: torch.dtype | None,
        deterministic: bool = False,
        block_size: int | None = None,
        depth: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.path = path
        self._base = decoder
        config, self._device, self._dtype = decoder.config, decoder.device, kv_dtype or decoder.kv_dtype
        self._form = decoder.kv_dtype if form is None else form
        layers, held_as = config.layer_kv(self._dtype.itemsize), f"torch {self._form} {self._dtype}"
        sizes = (config.vocab_size, config.hidden_size, config.max_context)
        self.info = ModelInfo(name, *sizes, layers, form=held_as, deterministic=deterministic)
        self._own_names = own_names
        self._gate = WeightsGate()
        self._deterministic = deterministic
        self._block_size = self.default_block_size if block_size is None else block_size
        self._num_threads = NUM_THREADS
        self._depth = self.default_depth if depth is None else depth

    @property
    def about(self) -> str:
        """How the weights are held, for people."""
        return self._base.about

    @property
    def weights_version(self) -> int:
        return self._gate.version

    @property
    def kv_budget_bytes(self) -> int:
        return int(KV_SHARE * self.free_bytes)

    @property
    def free_bytes(self) -> int:
        return free_bytes(self._device)

    @property
    def block_size(self) -> int:
        return self._block_size

    @abstractmethod
    def memory(self, limits: BackendLimits, num_rows: int) -> MemoryPlan: ...

    @abstractmethod
    def new_backend(self, limits: BackendLimits) -> TorchBackend[Any, Any]: ...

    def _new_memory(self, limits: BackendLimits) -> tuple[PagedKV, TorchKV]:
        """Bookkeeping and data of a KV memory of this size."""
        num_blocks = max(1, -(-limits.num_cells // self._block_size))
        inv_freq = self._base.inv_freq
        storage = TorchKV(self.info.layers, num_blocks, self._block_size, inv_freq, self._dtype, self._device)
        capabilities = Capabilities(
            state_bytes=True,
            shift=inv_freq.numel() > 0,
            max_seqs=limits.max_seqs,
            depth=self._depth,
            deterministic=self._deterministic,
        )
        kv = PagedKV(num_blocks * self._block_size, self.info.max_context, self._block_size, capabilities, storage)
        return kv, storage

    def replace_weight(self, name: str, value: Any) -> None:
        """New values for one tensor, under its name in the model's files. Waits for running steps.

        All KV of the old weights is invalid from then on: engines drop it and replay their requests.
        """
        own = self._own_names.get(name)
        if own is None:
            raise InvalidOperation(f"the model has no tensor {name!r}")
        try:
            tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidOperation(f"the new value of {name} is not a tensor: {error}") from None
        with self._gate.replacing(), torch.inference_mode():
            self._base.replace(own, tensor)

    def close(self) -> None:  # noqa: B027
        """Weights go when the last one who uses them does."""


class TorchModel(BaseTorchModel):
    """A model of one of our own families. `names` are what the model's files call its tensors."""

    def __init__(
        self,
        name: str,
        decoder: Decoder,
        names: Mapping[str, str],
        path: Path | None = None,
        *,
        form: torch.dtype | None = None,
        deterministic: bool = False,
        block_size: int | None = None,
        depth: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        if deterministic and not rows_are_independent(_matrices(decoder)):
            raise ConfigError("deterministic: on this machine a row of a matrix product depends on the other rows")
        self.decoder = decoder
        super().__init__(
            name,
            decoder,
            {in_file(own, names): own for own in decoder.names},
            path,
            form=form,
            deterministic=deterministic,
            block_size=block_size,
            depth=depth,
            kv_dtype=kv_dtype,
        )

    def memory(self, limits: BackendLimits, num_rows: int) -> MemoryPlan:
        return plan(self.decoder.config, self.decoder.weights.num_bytes, self._form, limits, num_rows)

    def new_backend(self, limits: BackendLimits) -> TorchBackend[Any, Any]:
        kv, storage = self._new_memory(limits)
        # The order of additions may depend on the number of threads, so that is the model's own where it must not vary.
        asked = None if self._deterministic else limits.num_threads
        return DenseBackend(
            self.decoder,
            kv,
            storage,
            self._gate,
            ubatch_size=limits.ubatch_size,
            num_threads=asked or self._num_threads,
        )


def _matrices(decoder: Decoder) -> list[Tensor]:
    """One of each shape that the decoder multiplies with."""
    layer = decoder.weights.layers[0]
    return [one.weight for one in (layer.qkv, layer.o, layer.gate_up, layer.down, decoder.weights.head)]
