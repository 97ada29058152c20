"""Latent attention behind a cached prefix, in chunks, and beside rows that decode, gives what whole prompts give.

FastDeploy's DeepseekV3MLAAttention, MLAAttentionBackend, Attention and (2.5) pre_process are real, with our rows.
Weights are small and random; kernels and linear layers are FAKE: NumPy, in float32, by the rules of FastDeploy's own.
"""

import importlib
import random
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration.worker import latent_prefix, patches
from tests.fastdeploy.inside.backends import import_worker_modules
from tests.fastdeploy.real_manager import IS_26
from tests.flash_attention import flash, softmax

HIDDEN, Q_RANK, RANK, NOPE, ROTARY, VALUE, HEADS, LAYERS = 16, 12, 16, 8, 4, 6, 4, 2
SCALE = (NOPE + ROTARY) ** -0.5
SEATS, BLOCKS, LONGEST = 5, 40, 24
PREFILL, DECODE = True, False
EMPTY = ((10**6,), 1, np.zeros((0, HIDDEN), "float32"), DECODE)
"""A seat whose request has ended: its lengths and its table are still there."""


@pytest.fixture(scope="module")
def host():
    """FastDeploy's modules, whose own operators and layers are replaced in these tests."""
    import_worker_modules()
    attention = "fastdeploy.model_executor.layers.attention"
    return SimpleNamespace(
        backend=importlib.import_module(f"{attention}.mla_attention_backend"),
        attention=importlib.import_module(f"{attention}.attention"),
        model=importlib.import_module("fastdeploy.model_executor.models.deepseek_v3"),
    )


# ---- kernels


def flat(tensor):
    return tensor.numpy().ravel()


class Kernels:
    """Of the pass that `meta` describes."""

    def __init__(self, block_size):
        self.block_size, self.meta = block_size, None

    def place(self, row, position):
        return flat(self.meta.block_tables[row])[position // self.block_size], 0, position % self.block_size

    def lengths(self, *given):
        """[0] the longest row, [1] prompt, [2] cached part, [3] both; [4], [5] of rows that decode."""
        encoder, decoder, now = (flat(each) for each in given[:3])
        decoding = (encoder == 0) & (now > 0)
        found = [now, encoder, decoder, (decoder + now)[now > 0], decoder[decoding], (decoder + now)[decoder > 0]]
        given[8].set_value(paddle.to_tensor([int(each.max(initial=0)) for each in found], dtype="int32"))

    def _write(self, latent, rotary, cache, rows):
        values, starts = cache.numpy(), flat(self.meta.cu_seqlens_q)
        for row in rows:
            for index in range(starts[row], starts[row + 1]):
                place = self.place(row, flat(self.meta.seq_lens_decoder)[row] + index - starts[row])
                values[place] = np.concatenate([flat(latent[index]), flat(rotary[index])])
        cache.set_value(paddle.to_tensor(values))

    def write_prompts(self, latent, rotary, cache, *_):
        self._write(latent, rotary, cache, np.flatnonzero(flat(self.meta.seq_lens_encoder)))

    def write_decoded(self, latent, rotary, cache, *_):
        encoder, decoder = flat(self.meta.seq_lens_encoder), flat(self.meta.seq_lens_decoder)
        self._write(latent, rotary, cache, np.flatnonzero((encoder == 0) & (decoder > 0)))

    def decode(self, q, cache, *_):
        """Rows that are prompts get zeros."""
        starts, decoder = flat(self.meta.cu_seqlens_q), flat(self.meta.seq_lens_decoder)
        query = q.numpy().reshape(len(q), -1, RANK + ROTARY)
        out = np.zeros((*query.shape[:2], RANK), "float32")
        for row in np.flatnonzero((flat(self.meta.seq_lens_encoder) == 0) & (decoder > 0)):
            for index in range(starts[row], starts[row + 1]):
                seen = range(decoder[row] + index - starts[row] + 1)
                latent = np.stack([cache.numpy()[self.place(row, position)] for position in seen])
                out[index] = softmax(query[index] @ latent.T * SCALE) @ latent[:, :RANK]
        return paddle.to_tensor(out.reshape(len(q), -1))

    def merge(self, prompts, decoded, *_):
        starts = flat(self.meta.cu_seqlens_q)
        for row in np.flatnonzero((flat(self.meta.seq_lens_encoder) == 0) & (flat(self.meta.seq_lens_decoder) > 0)):
            if starts[row] < starts[row + 1]:
                prompts[starts[row] : starts[row + 1]] = decoded[starts[row] : starts[row + 1]]

    def positions(self, encoder, decoder, now, positions, mask):
        """The operator of 2.5, its threads one after the other."""
        encoder, decoder, now = flat(encoder), flat(decoder), flat(now)
        written, begin = np.zeros((2, 4 * LONGEST * SEATS), "int32"), 0
        for prompt, cached, tokens in zip(encoder, decoder, now, strict=True):
            written[0, begin : begin + prompt], written[1, begin : begin + prompt] = np.arange(prompt), 1
            begin += prompt
            if cached > 0:
                written[0, begin : begin + tokens], written[1, begin : begin + tokens] = cached + np.arange(tokens), 0
                begin += tokens
        positions.set_value(paddle.to_tensor(written[0, : len(positions)]))
        mask.set_value(paddle.to_tensor(written[1, : len(mask), None]))


# ---- layers


def linear(weight):
    return lambda x: x @ weight


def normed(x):
    return x / paddle.sqrt((x * x).mean(-1, keepdim=True) + 1e-6), None


def rotate(position_ids, *tensors):
    angles = flat(position_ids)[:, None] / 50.0 ** (np.arange(ROTARY // 2) / ROTARY)
    cos, sin = np.cos(angles)[:, None].astype("float32"), np.sin(angles)[:, None].astype("float32")
    turned = []
    for tensor in tensors:
        pairs = tensor.numpy().reshape(len(angles), -1, ROTARY // 2, 2)
        first, second = pairs[..., 0], pairs[..., 1]
        both = np.stack([first * cos - second * sin, first * sin + second * cos], -1)
        turned.append(paddle.to_tensor(both.reshape(tensor.shape)))
    return turned


def weights(rng, ranks):
    """Of one layer, for each rank: its heads."""
    shapes = {"qkv_a": (HIDDEN, Q_RANK + RANK + ROTARY), "q_b": (Q_RANK, HEADS, NOPE + ROTARY)}
    shapes |= {"kv_b": (RANK, HEADS, NOPE + VALUE), "o": (HEADS, VALUE, HIDDEN)}
    whole = {name: rng.standard_normal(shape).astype("float32") / 4 for name, shape in shapes.items()}
    heads = HEADS // ranks
    for rank in range(ranks):
        own = slice(rank * heads, (rank + 1) * heads)
        q_b, kv_b, o = whole["q_b"][:, own], whole["kv_b"][:, own], whole["o"][own]
        flatten = {"qkv_a": whole["qkv_a"], "q_b": q_b.reshape(Q_RANK, -1), "kv_b": kv_b.reshape(RANK, -1)}
        yield {name: paddle.to_tensor(value) for name, value in {**flatten, "o": o.reshape(-1, HIDDEN)}.items()}


class Model:
    """The attention of some layers on some ranks, each with a cache of its own."""

    def __init__(self, host, monkeypatch, *, block_size=4, piece=1000, ranks=1, speculates=False, seed=0):
        self.block_size, self.ranks = block_size, ranks
        self.kernels = Kernels(block_size)
        self._fake_kernels(host, monkeypatch)
        config = self.config = self._config(piece, speculates)
        heads = HEADS // ranks
        self.backends = [
            host.backend.MLAAttentionBackend(config, kv_num_heads=1, num_heads=heads, head_dim=16) for _ in range(ranks)
        ]
        rng = np.random.default_rng(seed)
        shards = [list(weights(rng, ranks)) for _ in range(LAYERS)]
        self.layers = [
            [self._layer(host, monkeypatch, config, layer, shards[layer][rank]) for rank in range(ranks)]
            for layer in range(LAYERS)
        ]
        self.for_causal = object.__new__(host.model.DeepseekV3ForCausalLM)
        room = [SEATS * LONGEST * block_size]
        buffers = {"position_ids_buffer": room, "mask_encoder_batch_buffer": [*room, 1]}
        for name, shape in buffers.items():
            object.__setattr__(self.for_causal, name, paddle.zeros(shape, dtype="int32"))
        self.clear()

    def clear(self):
        """No block has been written."""
        shape = [BLOCKS, 1, self.block_size, RANK + ROTARY]
        self.caches = [[paddle.full(shape, float("nan")) for _ in range(LAYERS)] for _ in range(self.ranks)]

    def _fake_kernels(self, host, monkeypatch):
        kernels = self.kernels
        for name, kernel in {
            "get_block_shape_and_split_kv_block": kernels.lengths,
            "prefill_mla_write_cache": kernels.write_prompts,
            "decode_mla_write_cache": kernels.write_decoded,
            "multi_head_latent_attention": kernels.decode,
            "flash_attention_v3_varlen": flash,
        }.items():
            monkeypatch.setattr(host.backend, name, kernel, raising=False)
        monkeypatch.setattr(host.model, "merge_prefill_decode_output", kernels.merge, raising=False)
        monkeypatch.setattr(host.model, "get_position_ids_and_mask_encoder_batch", kernels.positions, raising=False)
        backend = host.backend.MLAAttentionBackend  # it asks for a GPU unless it has a flash function
        monkeypatch.setattr(backend, "flash_attn_func", staticmethod(flash))
        monkeypatch.setattr(backend, "flash_attn_kwargs", {"softmax_scale": SCALE}, raising=False)

    def _config(self, piece, speculates):
        scaling = {"factor": 1, "mscale_all_dim": 1, "original_max_position_embeddings": 4096}
        model = SimpleNamespace(
            hidden_size=HIDDEN, num_attention_heads=HEADS, num_hidden_layers=LAYERS, head_dim=NOPE + ROTARY,
            qk_nope_head_dim=NOPE, qk_rope_head_dim=ROTARY, v_head_dim=VALUE, q_lora_rank=Q_RANK, kv_lora_rank=RANK,
            rope_theta=100.0, rms_norm_eps=1e-6, rope_scaling=scaling, max_model_len=4096, start_layer_index=0,
        )  # fmt: skip
        return SimpleNamespace(
            model_config=model,
            cache_config=SimpleNamespace(block_size=self.block_size),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=self.ranks, tensor_parallel_rank=0, local_data_parallel_id=0,
                pd_disaggregation_mode="",
            ),
            speculative_config=SimpleNamespace(
                method="ngram" if speculates else None, num_speculative_tokens=2, model_type="main"
            ),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=piece),
            enable_rope_3d_runtime=False,
        )  # fmt: skip

    def _layer(self, host, monkeypatch, config, layer_id, shard):
        """FastDeploy's constructor, over linear layers of ours."""

        class Attention(host.attention.Attention):
            def __init__(self, fd_config, layer_id, **_):
                paddle.nn.Layer.__init__(self)
                self.layer_id = layer_id

        def up(kv_b_proj=None, **_):
            heads = shard["kv_b"].reshape([RANK, -1, NOPE + VALUE]).transpose([1, 0, 2])
            halves = {"k": heads[:, :, :NOPE].transpose([0, 2, 1]), "v": heads[:, :, NOPE:]}
            return lambda x, proj_type: paddle.bmm(x, halves[proj_type])

        by_name = {"q_b_proj": "q_b", "kv_b_proj": "kv_b", "qkv_a_proj_with_mqa": "qkv_a"}
        for name, made in {
            "MergedReplicatedLinear": lambda prefix="", **_: linear(shard[by_name[prefix.rpartition(".")[2]]]),
            "ColumnParallelLinear": lambda prefix="", **_: linear(shard[by_name[prefix.rpartition(".")[2]]]),
            "RowParallelLinear": lambda *_, **__: linear(shard["o"]),
            "RMSNorm": lambda *_, **__: normed,
            "KVBatchLinear": up,
            "DeepseekScalingRotaryEmbedding": lambda *_, **__: rotate,
            "Attention": Attention,
        }.items():
            monkeypatch.setattr(host.model, name, made)
        return host.model.DeepseekV3MLAAttention(config, layer_id, prefix="attention")

    def run(self, rows, *, late=None, waits=True, is_dummy=False):
        """One pass. `rows`: for each seat its block table, tokens in the cache, hidden states of the new ones, and
        PREFILL or DECODE. `late`: bytes of blocks that arrive when their layer is waited for, by layer and block.
        Returns hidden states after the last layer, by seat.
        """
        has_prompts = any(is_prompt for *_, is_prompt in rows)
        rows = [*rows, *[EMPTY] * (SEATS - len(rows))]
        now = [len(hidden) for *_, hidden, _ in rows]
        encoder = [new if is_prompt else 0 for new, (*_, is_prompt) in zip(now, rows, strict=True)]
        encoder = [3 if row is EMPTY and has_prompts else new for row, new in zip(rows, encoder, strict=True)]
        starts = np.concatenate([[0], np.cumsum(now)])

        def ints(values):
            return paddle.to_tensor(np.array(values, "int32"))

        metas = [
            SimpleNamespace(
                seq_lens_encoder=ints(encoder), seq_lens_this_time=ints(now),
                seq_lens_decoder=ints([cached for _, cached, _, _ in rows]),
                cu_seqlens_q=ints(starts), cu_seqlens_k=ints(starts), caches=self.caches[rank],
                block_tables=ints([[*table, *[0] * (LONGEST - len(table))] for table, *_ in rows]),
                batch_id_per_token=ints(np.repeat(np.arange(SEATS), now)), attn_backend=backend,
                max_len_tensor_cpu=ints([0] * 6), ids_remove_padding=paddle.zeros([int(starts[-1])], dtype="int64"),
                is_dummy_or_profile_run=is_dummy, forward_mode=SimpleNamespace(is_mixed=lambda: True),
                decoder_batch_ids=None, decoder_tile_ids_per_batch=None, decoder_num_blocks_device=None,
                decoder_chunk_size_device=None, kv_batch_ids=None, kv_tile_ids_per_batch=None, kv_num_blocks_x_cpu=None,
                rotary_embs=None, attn_mask=None, pre_caches_length=0,
            )
            for rank, backend in enumerate(self.backends)
        ]  # fmt: skip
        self.kernels.meta = metas[0]
        for rank, meta in enumerate(metas):
            self.backends[rank].init_attention_metadata(meta)
            if waits:
                setattr(meta, patches.COUNTER, self._counter(rank, late or {}))
        places = self._positions(metas[0])
        hidden = paddle.to_tensor(np.concatenate([row[2] for row in rows]))
        for shards in self.layers:
            outputs = [shard.forward(meta, hidden, *places) for shard, meta in zip(shards, metas, strict=True)]
            hidden = hidden + sum(outputs[1:], outputs[0])
        return [hidden.numpy()[starts[seat] : starts[seat + 1]] for seat in range(SEATS)]

    def _counter(self, rank, late):
        def wait_for_layer(layer):
            values = self.caches[rank][layer].numpy()
            for block, written in late.get(layer, {}).items():
                values[block] = written
            self.caches[rank][layer].set_value(paddle.to_tensor(values))

        return SimpleNamespace(wait_for_layer=wait_for_layer)

    def _positions(self, meta):
        if not IS_26:
            return self.for_causal.pre_process(meta)
        row = np.repeat(np.arange(SEATS), flat(meta.seq_lens_this_time))
        offset = np.arange(len(row)) - flat(meta.cu_seqlens_q)[row]
        return (paddle.to_tensor((flat(meta.seq_lens_decoder)[row] + offset).astype("int32")),)


class Prompt:
    """A request: hidden states of all tokens, of the last `answer` of which only one a pass is known."""

    def __init__(self, model, rng, *, length, answer=0):
        self.hidden = rng.standard_normal((length + answer, HIDDEN)).astype("float32")
        self.length = length
        model.clear()
        table = range(-(-len(self.hidden) // model.block_size))
        self.expected = [model.run([(table, 0, self.hidden[:length], PREFILL)])[0]]
        for done in range(length, len(self.hidden)):
            self.expected.append(model.run([(table, done, self.hidden[done : done + 1], DECODE)])[0])
        self.expected = np.concatenate(self.expected)
        self.written = [cache.numpy()[list(table)] for cache in model.caches[0]]
        model.clear()


class Life:
    """Requests in seats, computed in random passes over shuffled blocks."""

    def __init__(self, model, prompts, seed, *, most_decoded=1):
        self.model, self.rng, self.most_decoded = model, random.Random(seed), most_decoded
        self.free = self.rng.sample(range(BLOCKS), BLOCKS)
        self.late = {layer: {} for layer in range(LAYERS)}
        self.seats = [self._start(prompt) for prompt in prompts]

    def _start(self, prompt):
        """With some of its blocks cached: they arrive when the first pass waits for them."""
        blocks = -(-len(prompt.hidden) // self.model.block_size)
        table, self.free = self.free[:blocks], self.free[blocks:]
        cached = self.rng.choice([0, self.rng.randrange((prompt.length - 1) // self.model.block_size + 1)])
        for layer, late in self.late.items():
            late.update({table[index]: prompt.written[layer][index] for index in range(cached)})
        return SimpleNamespace(prompt=prompt, table=table, done=cached * self.model.block_size)

    def run(self, **options):
        """All to their ends. Raises `AssertionError` at the first pass that differs."""
        while any(seat.done < len(seat.prompt.hidden) for seat in self.seats):
            rows = [self._row(seat) for seat in self.seats]
            if not any(len(hidden) for *_, hidden, _ in rows):
                continue
            found = self.model.run(rows, late=self.late, **options)
            self.late = {layer: {} for layer in range(LAYERS)}
            for seat, row, hidden in zip(self.seats, rows, found, strict=False):
                expected = seat.prompt.expected[seat.done : seat.done + len(row[2])]
                np.testing.assert_allclose(hidden, expected, atol=2e-5)
                seat.done += len(row[2])

    def _row(self, seat):
        """Nothing, as between chunks; a chunk; or what decodes. With late blocks all take part."""
        left, rest = len(seat.prompt.hidden) - seat.done, seat.prompt.length - seat.done
        if rest > 0:
            new = self.rng.randint(1, rest) if self.rng.random() < 0.7 else rest
        else:
            new = min(left, self.rng.randint(1, self.most_decoded))
        if not any(self.late.values()) and self.rng.random() < 0.2:
            new = 0
        return seat.table, seat.done, seat.prompt.hidden[seat.done : seat.done + new], PREFILL if rest > 0 else DECODE


def make_life(model, seed, **options):
    rng, sizes, block = np.random.default_rng(seed), random.Random(seed), model.block_size
    lengths = [sizes.choice([1, block - 1, block, block + 1, sizes.randint(1, 5 * block)]) for _ in range(SEATS - 1)]
    prompts = [Prompt(model, rng, length=length, answer=sizes.randint(0, 3)) for length in lengths]
    return Life(model, prompts, seed, **options)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("piece", [1, 3, 4, 5, 1000])
def test_random_passes_give_what_whole_prompts_give(host, monkeypatch, piece, ranks):
    model = Model(host, monkeypatch, piece=piece, ranks=ranks, seed=piece)
    for seed in range(6):
        make_life(model, seed).run()


@pytest.mark.parametrize("piece", [63, 64, 65])
def test_blocks_of_fastdeploys_size(host, monkeypatch, piece):
    model, rng = Model(host, monkeypatch, block_size=64, piece=piece), np.random.default_rng(piece)
    for seed, length in enumerate((130, 192)):
        Life(model, [Prompt(model, rng, length=length, answer=1), Prompt(model, rng, length=3)], seed).run()


def test_rows_that_decode_several_guessed_tokens_are_as_before(host, monkeypatch):
    model = Model(host, monkeypatch, piece=5, speculates=True)
    for seed in range(6):
        make_life(model, seed, most_decoded=3).run()


CHUNKS = [(7, 7), (8, 6), (1, 13), (13, 1)]


@pytest.mark.parametrize("cut", CHUNKS)
def test_without_the_mend_a_second_chunk_is_wrong(host, monkeypatch, cut):
    """Else FastDeploy has mended it, and ours can go."""
    model = Model(host, monkeypatch)
    prompt = Prompt(model, np.random.default_rng(1), length=14)
    monkeypatch.setattr(latent_prefix, "find_prefix", lambda *_: None)
    table, first = [3, 9, 1, 7], cut[0]
    whole = model.run([(table, 0, prompt.hidden[:first], PREFILL)])[0]
    np.testing.assert_allclose(whole, prompt.expected[:first], atol=2e-5)
    behind = model.run([(table, first, prompt.hidden[first:], PREFILL)])[0]
    assert np.abs(behind - prompt.expected[first:]).max() > 0.01


def test_a_prefix_is_read_behind_the_wait_for_its_layer(host, monkeypatch):
    model = Model(host, monkeypatch)
    prompt = Prompt(model, np.random.default_rng(2), length=14)
    late = {layer: {5: written[0], 6: written[1]} for layer, written in enumerate(prompt.written)}
    row = ([5, 6, 8, 9], 8, prompt.hidden[8:], PREFILL)
    assert np.isnan(model.run([row], late=late, waits=False)[0]).all()
    np.testing.assert_allclose(model.run([row], late=late)[0], prompt.expected[8:], atol=2e-5)


@pytest.mark.skipif(IS_26, reason="2.6 counts positions rightly")
def test_without_the_mend_a_chunk_spoils_the_rows_behind_it(host, monkeypatch):
    model, rng = Model(host, monkeypatch), np.random.default_rng(3)
    chunked, fresh = Prompt(model, rng, length=14), Prompt(model, rng, length=5)
    model.run([([1, 2, 3, 4], 0, chunked.hidden[:8], PREFILL)])
    rows = [([1, 2, 3, 4], 8, chunked.hidden[8:], PREFILL), ([5, 6], 0, fresh.hidden, PREFILL)]
    for found, prompt in zip(model.run(rows), (chunked, fresh), strict=False):
        np.testing.assert_allclose(found, prompt.expected[-len(found) :], atol=2e-5)
    hosts = host.model.DeepseekV3ForCausalLM.pre_process.__wrapped__
    monkeypatch.setattr(model, "_positions", lambda meta: hosts(model.for_causal, meta))
    assert np.abs(model.run(rows)[1] - fresh.expected).max() > 0.01


def test_profiling_run_reads_a_whole_piece_and_plain_passes_read_no_piece(host, monkeypatch):
    model, sizes = Model(host, monkeypatch, piece=10), []
    for cache in model.caches[0]:
        cache.set_value(paddle.zeros_like(cache))
    expand = latent_prefix.PassPrefix.expand

    def counted(self, begin, end, width):
        sizes.append(end - begin)
        return expand(self, begin, end, width)

    monkeypatch.setattr(latent_prefix.PassPrefix, "expand", counted)
    hidden = np.ones((6, HIDDEN), "float32")
    model.run([([0, 1], 0, hidden, PREFILL)], is_dummy=True)
    assert sizes == [10] * LAYERS
    model.run([([0, 1], 4, hidden[:1], DECODE)], is_dummy=True)
    model.run([([0, 1], 0, hidden, PREFILL), ([2, 3], 4, hidden[:1], DECODE)])
    assert sizes == [10] * LAYERS


def test_a_flash_function_that_returns_no_log_sum_exp_is_refused(host, monkeypatch):
    config = Model(host, monkeypatch).config
    monkeypatch.setattr(host.backend, "flash_attention_v3_varlen", lambda *_: None)
    with pytest.raises(ConfigError, match=r"MLA_ATTN needs FlashAttention 3.*compute capability 9\.0"):
        host.backend.MLAAttentionBackend(config, 1, HEADS, 16)


def test_a_log_sum_exp_of_another_shape_is_refused(host, monkeypatch):
    model = Model(host, monkeypatch)
    prompt = Prompt(model, np.random.default_rng(4), length=14)
    attention = model.backends[0].flash_attn_func
    monkeypatch.setattr(attention, "_attend", lambda *args, **named: (flash(*args, **named)[0], paddle.zeros([1, 3])))
    model.run([([1, 2], 0, prompt.hidden[:8], PREFILL)])
    with pytest.raises(RuntimeError, match=r"shape \[1, 3\] from the flash function, expected \[4 heads, 6 tokens\]"):
        model.run([([1, 2, 3, 4], 8, prompt.hidden[8:], PREFILL)])


def test_half_batches_with_a_prefix_are_refused():
    meta = SimpleNamespace(**{latent_prefix.PREFIX: object()})
    with pytest.raises(RuntimeError, match="behind a cached prefix cannot run in half batches"):
        patches.split_batch(lambda given: [given, given], None, (meta,), {})
