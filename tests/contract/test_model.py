"""The model-agnostic side of the contract: handles, the registry of model kinds, layers."""

import time

import pytest

import tokenmill
from tokenmill import open_model
from tokenmill.backends import loading
from tokenmill.backends.fake import FakeBackend, FakeConfig, FakeModel
from tokenmill.contract import BackendLimits, BatchBuilder, LayerKV
from tokenmill.contract.backend import LoadOptions
from tokenmill.errors import ConfigError, ModelNotFound


@pytest.mark.req("R20")
def test_a_new_kind_of_model_joins_by_registration() -> None:
    def open_parrot(model: str, options: LoadOptions) -> FakeModel | None:
        return FakeModel(FakeConfig(vocab_size=7)) if model.endswith(".parrot") else None

    loading.register_opener("parrot", open_parrot)
    try:
        handle = open_model("grey.parrot")
        assert handle.info.vocab_size == 7
        with handle.new_backend(BackendLimits(num_cells=32)) as backend:
            assert backend.decode(BatchBuilder().add_run([1, 2], 0, 0).build()).logits.shape == (1, 7)
        with pytest.raises(ConfigError, match="already registered"):
            loading.register_opener("parrot", open_parrot)
    finally:
        loading.unregister_opener("parrot")
    with pytest.raises(ModelNotFound, match=r"grey\.parrot.*smollm2-135m.*, fake"):
        open_model("grey.parrot")


def test_the_fake_model_takes_the_time_that_it_is_told_to() -> None:
    handle = open_model("fake", step_us=20_000, token_us=1000)
    with handle.new_backend(BackendLimits()) as backend:
        began = time.monotonic()
        backend.decode(BatchBuilder().add_run([1, 2, 3], 0, 0).build())
        assert time.monotonic() - began >= 0.023


@pytest.mark.req("R20")
def test_backends_of_one_handle_share_the_model_and_nothing_else() -> None:
    handle = open_model("fake", vocab_size=64)
    with handle.new_backend(BackendLimits()) as one, handle.new_backend(BackendLimits(num_cells=64)) as two:
        prompt = BatchBuilder().add_run([1, 2, 3], 0, 0).build()
        assert (one.decode(prompt).logits == two.decode(prompt).logits).all()
        one.kv.clear()
        assert two.kv.seq_pos_max(0) == 2
        assert two.kv.stats().num_cells == 64


def test_wrong_options_are_named() -> None:
    with pytest.raises(ConfigError, match="colour"):
        open_model("fake", colour="red")


def test_kv_bytes_add_up_over_layers() -> None:
    full = LayerKV(num_heads=3, key_dim=64, value_dim=64, dtype_bytes=2)
    assert full.bytes_per_token == 768
    assert LayerKV("state").bytes_per_token == LayerKV("shared").bytes_per_token == 0
    assert FakeModel(FakeConfig(windows=(None, 8))).info.kv_bytes_per_token == 16


def test_public_names_are_lazy_and_unknown_ones_are_named() -> None:
    assert tokenmill.open_model is open_model
    with pytest.raises(AttributeError, match="'nothing'"):
        tokenmill.nothing  # noqa: B018
    assert isinstance(FakeModel().new_backend(BackendLimits()), FakeBackend)
