"""The latent pool: one tensor that is K and V, its views, scales, sharing, and what it refuses."""

from typing import Any

import pytest
import torch

import anyattn
from anyattn.core.kv.pools.mla import MLAPool
from anyattn.errors import PoolError
from anyattn.testing.mla_cases import MLACase

SPEC = MLACase(num_q_heads=4).spec()


def pool(specs: list[anyattn.AttentionSpec] | None = None, **options: Any) -> MLAPool:
    sizes: dict[str, Any] = {"num_slots": 16, "page_size": 4, "kv_dtype": torch.float32}
    return MLAPool(specs or [SPEC], dtype=torch.float32, **(sizes | options))


def test_values_are_a_part_of_the_keys() -> None:
    made, rows = pool(), torch.randn(3, 1, 80)
    made.write(0, torch.tensor([5, 9, 4]), rows)
    assert made.latent_cache(0).shape == (5, 4, 1, 80)
    k, v = made.gather(0, torch.tensor([9, 5]))
    assert torch.equal(k, rows[[1, 0]])
    assert torch.equal(v, rows[[1, 0], :, :64])
    assert v.data_ptr() == k.data_ptr()
    assert made.value_cache(0).data_ptr() == made.key_cache(0).data_ptr()
    assert made.nbytes() == 5 * 4 * 80 * 4
    assert int((made.latent_cache(0) != 0).any(-1).sum()) == 3


def test_hnd_is_the_same_bytes() -> None:
    made = pool(layout="HND")
    made.write(0, torch.tensor([6]), torch.ones(1, 1, 80))
    assert made.key_cache(0).shape == (5, 1, 4, 80)
    assert bool((made.key_cache(0)[1, 0, 2] == 1).all())


def test_fp8_is_scaled_once_and_saturates() -> None:
    made = pool(kv_dtype=torch.float8_e4m3fn, scale=2.0)
    given = torch.full((1, 1, 80), 3.0)
    given[..., 70:] = 1e6
    made.write(0, torch.tensor([4]), given)
    stored, _ = made.gather(0, torch.tensor([4]))
    assert stored.float()[0, 0, 0] == 1.5
    assert stored.float()[0, 0, 79] == 448.0
    assert given[0, 0, 0] == 3.0
    k_scale, v_scale = made.scales(0)
    assert k_scale is v_scale
    assert k_scale.host == (2.0,)


def test_layers_may_share_latents() -> None:
    second = MLACase(num_q_heads=4).spec()
    shared = anyattn.AttentionSpec(
        num_q_heads=4, num_kv_heads=1, head_dim=80, v_head_dim=64, scale=0.1, mla=second.mla, kv_shared_with=0
    )
    made = pool([SPEC, shared])
    made.write(1, torch.tensor([4]), torch.ones(1, 1, 80))
    assert not made.latent_cache(1).any()
    made.write(0, torch.tensor([4]), torch.ones(1, 1, 80))
    assert made.gather(1, torch.tensor([4]))[0].eq(1).all()
    with pytest.raises(PoolError, match="shares the latents"):
        pool([shared])


def test_what_is_no_latent_layer_is_refused() -> None:
    dense = anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=80)
    with pytest.raises(PoolError, match="isn't a latent layer"):
        pool([SPEC, dense])
    many = anyattn.AttentionSpec(
        num_q_heads=4, num_kv_heads=4, head_dim=80, v_head_dim=64, scale=0.1, mla=SPEC.mla
    )
    with pytest.raises(PoolError, match="isn't a latent layer"):
        pool([many])
    with pytest.raises(PoolError, match="layout"):
        pool(layout="NZ")


def test_create_pool_gives_the_latent_one() -> None:
    decision = anyattn.select([SPEC], dtype="float32", device="cpu", page_size=4)
    assert (decision.prefill.backend, decision.decode.backend) == ("torch_native", "torch_native")
    made = anyattn.kv.create_pool(decision, num_slots=8, k_scale=0.5)
    assert isinstance(made, MLAPool)
    assert made.scales(0)[1].host == (0.5,)
    for scales in ({"k_scale": [0.5]}, {"k_scale": 0.5, "v_scale": 2.0}, {"v_scale": [1.0]}):
        with pytest.raises(PoolError, match="latent pool"):
            anyattn.kv.create_pool(decision, num_slots=8, **scales)
