"""Prompts with images and videos, made by FastDeploy's own processors, one after the other through the real Request and
ResourceManagerV1 over our adapter.

What each prompt finds is compared with a definition that knows no blocks and no hashes: two prompts share as many
tokens as are equal in id, in rotary position, and in the pixels that they stand for. A part of a video is two steps of
time, as FastDeploy computes it.
"""

import pickle
import random
from itertools import takewhile
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from PIL import Image

import fastdeploy  # noqa: F401  (first: its modules import each other in a circle)
from fastdeploy import utils
from fastdeploy.engine.request import ImagePosition, Request, SamplingParams
from fastdeploy.engine.sched.resource_manager_v1 import ResourceManagerV1
from fastdeploy.input.ernie4_5_vl_processor import Ernie4_5_VLProcessor
from fastdeploy.input.ernie4_5_vl_processor import process as ernie
from fastdeploy.input.ernie4_5_vl_processor.image_preprocessor.image_preprocessor_adaptive import AdaptiveImageProcessor
from fastdeploy.input.qwen3_vl_processor import image_processor as qwen3_image_processor
from fastdeploy.input.qwen3_vl_processor import process as qwen3
from fastdeploy.input.qwen3_vl_processor.qwen3_vl_processor import Qwen3VLProcessor
from fastdeploy.input.qwen_vl_processor import image_processor as qwen_image_processor
from fastdeploy.input.qwen_vl_processor import process as qwen
from fastdeploy.input.qwen_vl_processor.qwen_vl_processor import QwenVLProcessor
from fastdeploy.model_executor.layers.rotary_embedding import get_rope_3d
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.transfer_name import give_name, sent_inputs
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import prompt_inputs
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.adapter import PrefixCacheAdapter
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.task_tokens import TaskTokens
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.uncached import Uncached
from fastdeploy_kvcache_v1.scheduler.block_hashing import BlockHasher
from tests.fastdeploy.real_manager import BLOCK_SIZE, make_manager, make_request
from tests.fastdeploy.scene import Scene

PLACEHOLDERS = {"qwen": ("<|image_pad|>", "<|video_pad|>"), "ernie": ("<|image@placeholder|>", "<|video@placeholder|>")}
IMAGE_TOKEN, VIDEO_TOKEN = 9, 10
SIZES = [(56, 56), (56, 112), (112, 56), (28, 112), (112, 28)]


class Tokenizer:
    """A character is a token."""

    tokenize = list

    def convert_tokens_to_ids(self, text):
        return [ord(each) % 200 + 20 for each in text]


class Reader(list):
    """Frames as a video decoder returns them."""

    def __getitem__(self, index):
        return SimpleNamespace(asnumpy=lambda: super(Reader, self).__getitem__(index))


def read_video(frames, save_to_disk=False):
    return Reader(frames), {"num_of_frame": len(frames), "fps": 4.0, "duration": len(frames) / 4}, None


def frames_with_times(path, reader, meta, **given):
    frames = [reader[index].asnumpy() for index in range(len(reader))]
    return [Image.fromarray(each, "RGB") for each in frames], None, [index / 4 for index in range(len(frames))]


COMMON = {"fps": 2, "target_frames": -1, "min_frames": 4, "max_frames": 768, "enable_processor_cache": False}
COMMON |= {"temporal_conv_size": 2, "spatial_conv_size": 2, "tokenizer": Tokenizer()}
PIXELS = {"image_min_pixels": 1, "image_max_pixels": 10**9, "video_min_pixels": 1, "video_max_pixels": 10**9}


def bare(kind, **attributes):
    made = object.__new__(kind)
    vars(made).update(attributes)
    return made


def qwen_packer(packer, process, image_processor, tokens_per_second=2):
    image, video = PLACEHOLDERS["qwen"]
    ids = {"image_token": image, "video_token": video, "image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN}
    images = image_processor.ImageProcessor(min_pixels=1)
    return bare(packer, processor=bare(
        process.DataProcessor, image_processor=images, tokens_per_second=tokens_per_second, frame_factor=2,
        image_patch_id=IMAGE_TOKEN, **ids, **COMMON,
    ))  # fmt: skip


def ernie_packer():
    processor = bare(
        ernie.DataProcessor, image_preprocessor=AdaptiveImageProcessor(), image_patch_id=IMAGE_TOKEN,
        frames_sample="leading", **COMMON, **PIXELS,
    )  # fmt: skip
    return bare(Ernie4_5_VLProcessor, ernie4_5_processor=processor, processor=processor, image_patch_id=IMAGE_TOKEN)


PACKERS = {
    "qwen2": lambda: qwen_packer(QwenVLProcessor, qwen, qwen_image_processor, tokens_per_second=1),
    "qwen2.5": lambda: qwen_packer(QwenVLProcessor, qwen, qwen_image_processor),
    "qwen3": lambda: qwen_packer(Qwen3VLProcessor, qwen3, qwen3_image_processor),
    "ernie": ernie_packer,
}


@pytest.fixture(params=PACKERS)
def model(request, monkeypatch):
    for module in (qwen, qwen3, ernie):
        monkeypatch.setattr(module, "read_video_decord", read_video)
    monkeypatch.setattr(qwen3, "VIDEO_MIN_PIXELS", 1)
    monkeypatch.setattr(ernie, "read_frames_decord", frames_with_times)
    monkeypatch.setattr(ernie, "render_frame_timestamp", lambda frame, timestamp: frame)
    return request.param


def picture(color, size):
    return np.full((*size, 3), color, dtype="uint8")


class Piece(SimpleNamespace):
    """Of a prompt: an image (one color) or a video (a color for each pair of frames)."""

    @property
    def is_image(self):
        return len(self.colors) == 1

    @property
    def content(self):
        if self.is_image:
            return Image.fromarray(picture(*self.colors, self.size), "RGB")
        frames = [picture(color, self.size) for color in self.colors for _ in range(2)]
        return {"video": frames, "fps": self.fps, "target_frames": len(frames)}


def inputs(model, pieces):
    """As FastDeploy's processor makes them of texts and `Piece`s."""
    image, video = PLACEHOLDERS["ernie" if model == "ernie" else "qwen"]
    text = "".join(each if isinstance(each, str) else image if each.is_image else video for each in pieces)
    items = [[each for each in pieces if isinstance(each, Piece) and each.is_image is kind] for kind in (True, False)]
    packer = PACKERS[model]()
    contents = [[each.content for each in kind] for kind in items]
    if model == "ernie":
        contents[1] = [each | {"fps": -1} for each in contents[1]]
    outputs = packer.processor.text2ids(text, *contents, *([each.uuid for each in kind] for kind in items))
    return packer.pack_outputs(outputs)


def identities(prompt, packed):
    """What decides the KV of each token, beside the tokens before it."""
    rows, grids, first = packed["position_ids"], packed["grid_thw"] if packed["mm_positions"] else (), 0
    pixels = [None] * len(rows)
    for position, grid in zip(packed["mm_positions"], grids, strict=True):
        frames, *size = map(int, grid)
        steps = max(1, frames // 2)
        for part in range(steps):
            end, length = first + frames // steps * size[0] * size[1], position.length // steps
            for number in range(length):
                content = packed["images"][first:end].tobytes(), frames > 1, *size, number
                pixels[position.offset + part * length + number] = content
            first = end
    for index, token in enumerate(prompt):
        row = rows[index] if index < len(rows) else [rows.max() + 1 + index - len(rows)] * 3
        yield token, tuple(map(int, row)), pixels[index] if index < len(pixels) else None


def shared(one, other):
    """How many tokens two prompts share."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


class Line:
    """Prompts that come one after the other, into a cache that loses none."""

    def __init__(self, model):
        self.scene, self.model = Scene(make_manager(20000, 0, "write_through", max_tokens=2048)), model
        self.before = []

    def ask(self, pieces, most):
        """Returns tokens found, and those that the definition allows. FastDeploy cuts a prompt to `most` tokens."""
        packed = inputs(self.model, pieces)
        prompt = packed["input_ids"].tolist()[:most]
        meaning = list(identities(prompt, packed))
        request = self.scene.add(f"r{len(self.before)}", prompt, 1, packed)
        assert all(isinstance(each, ImagePosition) for each in packed["mm_positions"])
        self.scene.run_dry()
        most = max((shared(meaning, each) for each in self.before), default=0)
        self.before.append(meaning)
        return request.num_cached_tokens, min(most, len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def random_piece(rng):
    size, fps, uuid = rng.choice(SIZES), rng.choice([0.5, 1, 2, 4]), rng.choice([None, None, "one", "two"])
    steps = 1 if rng.random() < 0.5 else rng.choice([2, 4, 6])
    return Piece(colors=[rng.choice([3, 200]) for _ in range(steps)], size=size, fps=fps, uuid=uuid)


def random_pieces(rng, known):
    """Often as one before, with a change somewhere."""
    if known and rng.random() < 0.7:
        pieces = [Piece(**vars(each)) if isinstance(each, Piece) else each for each in rng.choice(known)]
        changed = rng.choice([each for each in pieces if isinstance(each, Piece)] or [None])
        if changed is not None:
            name = rng.choice(["colors", "size", "fps", "uuid", "order", "nothing"])
            if name == "order":
                rng.shuffle(pieces)
            elif name != "nothing":
                value = getattr(random_piece(rng), name)
                setattr(changed, name, value[:1] * len(changed.colors) if name == "colors" else value)
    else:
        pieces = ["system: " * rng.randrange(3)]
        for _ in range(rng.randrange(4)):
            pieces += [random_piece(rng), rng.choice(["", "a", "what is it? ", "and then? "])]
    return [*pieces, rng.choice(["?", "tell me"])]


def test_prompts_share_what_agrees_in_tokens_positions_and_pixels(model):
    rng, line, known = random.Random(1), Line(model), []
    hits = with_items = cut = 0
    for _ in range(150):
        pieces = random_pieces(rng, known)
        known.append(pieces)
        most = rng.choice([None, None, None, 60])
        found, allowed = line.ask(pieces, most)
        assert found == allowed, pieces
        hits += found > 0
        with_items += found > 0 and any(isinstance(piece, Piece) for piece in pieces)
        cut += found > 0 and most is not None
    assert line.scene.manager.cache_manager.uncached == Uncached()
    assert min(hits, with_items) > 40
    assert cut > 8


def names(request, told=None):
    return TaskTokens(request, BLOCK_SIZE, told).hashes


OURS = ResourceManagerV1.__new__(ResourceManagerV1)
OURS.cache_manager = PrefixCacheAdapter.__new__(PrefixCacheAdapter)
VIDEO = Piece(colors=[3, 4, 3, 4], size=(56, 56), fps=1, uuid=None)
PROMPT = ["look: ", VIDEO, " and ", Piece(colors=[7], size=(56, 112), fps=1, uuid="mine"), "what is it?" * 3]


def test_a_hundred_matches_give_the_names_of_the_first(model):
    """FastDeploy cuts videos before each, and what it cut before; then it makes tensors of the arrays."""
    packed = inputs(model, PROMPT)
    request = make_request("r", packed["input_ids"].tolist(), packed)
    first = names(request)
    assert len(first) == len(request.prompt_token_ids) // BLOCK_SIZE
    for _ in range(100):
        ResourceManagerV1._update_mm_hashes.__wrapped__(SimpleNamespace(), request)
        assert names(request) == first
    positions = request.multimodal_inputs["mm_positions"]
    assert len({each.offset for each in positions}) < len(positions), "else it is harmless"
    utils.to_tensor([request])
    assert names(request) == first
    assert getattr(pickle.loads(pickle.dumps(request)), prompt_inputs.ATTRIBUTE) is None, "workers have no use for it"


def test_fastdeploy_cuts_the_videos_of_a_request_once(model):
    """Workers find each item at the place that it has after the first match."""
    packed = inputs(model, PROMPT)
    image = packed["mm_positions"][1]
    request = make_request("r", packed["input_ids"].tolist(), packed)
    for forged in (True, {}):
        request._kvcache_v1_cut = forged  # a client can name it
    for _ in range(3):
        OURS._update_mm_hashes(request)
        *parts, last = request.multimodal_inputs["mm_positions"]
        assert [each.offset for each in parts] == [6 + index * parts[0].length for index in range(len(parts))]
        assert len(parts) == (4 if model == "ernie" else 2)
        assert (last.offset, last.length) == (image.offset, image.length)


def test_a_prompt_that_was_cut_and_put_before_has_the_same_names(model):
    packed = inputs(model, PROMPT)
    one, other = (make_request("r", packed["input_ids"].tolist(), dict(packed)) for _ in range(2))
    OURS._update_mm_hashes(other)
    utils.to_tensor([other])
    assert names(one) == names(other) != ()


@pytest.mark.parametrize("pieces", [["only text " * 9], PROMPT, [VIDEO, "!" * 30]], ids=["text", "both", "video"])
def test_prefill_and_decode_give_a_prompt_the_same_names(model, pieces):
    packed = inputs(model, pieces)
    request = make_request("r", packed["input_ids"].tolist(), packed)
    request.sampling_params, request.ic_req_data = SamplingParams(), None
    give_name(request)
    received = Request.from_dict(pickle.loads(pickle.dumps(request.to_dict())))
    assert not {"images", "grid_thw"} & received.multimodal_inputs.keys()
    assert names(received, sent_inputs(received)) == names(request) != ()


def test_a_prompt_of_text_has_the_names_of_its_tokens(model):
    packed = inputs(model, ["only text " * 9])
    assert packed["position_ids"].shape == (90, 3)
    hasher = BlockHasher(BLOCK_SIZE)
    hasher.extend(packed["input_ids"])
    assert names(make_request("r", packed["input_ids"].tolist(), packed)) == hasher.hashes


@pytest.mark.parametrize("family", ["qwen2_5_vl", "ernie4_5_moe_vl"])
def test_positions_behind_a_prompt_equal_fastdeploys_rotary_positions(family):
    """The same angles for what it makes of the prompt's positions, and of all that ours says."""

    def angles(positions, num_outputs):
        return get_rope_3d(
            position_ids=paddle.to_tensor(positions), rotary_dim=16, partial_rotary_factor=1.0, base=100.0,
            max_position=128, freq_allocation=4, rope_scaling={}, model_type=family, max_len_lst=[num_outputs],
            cumsum_seqlens=[0, len(positions)],
        )[0].numpy()[:, :, :80]  # fmt: skip

    known = np.random.default_rng(1).integers(0, 40, (50, 3))
    named = prompt_inputs.TokenRows(known, None)(0, 80).removeprefix(b"positions")
    rows = np.frombuffer(named, "<i8").reshape(80, 3)
    assert np.array_equal(angles(known, 30), angles(rows, 0))
    assert not np.array_equal(angles(known, 30), angles(np.roll(rows, 1, axis=1), 0)), "else it sees nothing"
