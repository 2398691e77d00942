"""Golden encodings of the released vocabulary; bytes; text that arrives in pieces."""

import base64
import hashlib

import pytest

from k3_jax.config import ConfigError
from k3_jax.weights.tokenizer import ByteTokenizer, StreamDecoder, Tokenizer, load_tokenizer, slices


@pytest.fixture(scope="module")
def tokenizer(shared) -> Tokenizer:
    return load_tokenizer(shared / "golden" / "tokenizer" / "tiktoken.model", 163840)


def test_golden_encodings(tokenizer):
    assert tokenizer.vocab_size == 163840
    assert tokenizer.encode("The capital of France is") == [1008, 10484, 318, 15383, 387]
    assert tokenizer.encode(" Paris") == [17374]
    text = "You are Kimi, created by Moonshot AI. 你好，世界！ 12345 don't\n\n  x = [1,2]\t# ok"
    ids = [3900, 554, 24980, 72, 11, 5232, 673, 30218, 10065, 22572, 13, 220, 33845, 378, 2243, 856, 220, 6694, 2899]
    ids += [4536, 382, 220, 1288, 327, 793, 16, 11, 17, 60, 197, 2, 8961]
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_text_unless_allowed(tokenizer):
    assert tokenizer.encode("<|open|>message") == [27, 91, 4454, 91, 29, 2778]
    assert tokenizer.encode("<|open|>message", allow_special=True) == [163587, 2778]
    assert tokenizer.special["[BOS]"] == 163584 and tokenizer.special["<|end_of_msg|>"] == 163586
    assert tokenizer.special["<|media_pad|>"] == 163605 and tokenizer.special["[PAD]"] == 163839
    assert tokenizer.special["<|reserved_token_163590|>"] == 163590 and len(tokenizer.special) == 256


def test_golden_messages(tokenizer):
    def message(*segments: str) -> list[int]:  # specials in every second segment
        return [i for n, s in enumerate(segments) for i in tokenizer.encode(s, allow_special=n % 2 == 0)]

    user = message("<|open|>", "message", "", " role", "", '="', "", "user", "", '"', "<|sep|>", "Hello", "<|close|>")
    assert user == [163587, 2778, 6244, 878, 2482, 1, 163589, 19180, 163588]
    image = message("<|media_begin|>", "image 448x448", "<|media_content|><|media_pad|><|media_end|>")
    assert image == [163602, 4017, 220, 39799, 87, 39799, 163603, 163605, 163604]
    stub = [163588, 2778, 163589, 163586, 163587, 2778, 6244, 878, 69702, 1, 163589, 163587, 39964, 163589]
    expected = '<|close|>message<|sep|><|end_of_msg|><|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    assert tokenizer.decode(stub) == expected


PROTOCOL = {  # bytes, sha256[:16], ids
    "tools": (
        72,
        "bbd0773d27b2a814",
        "2 30391 198 12214 554 276 2878 7697 11 11880 306 11419 11438 1481 3251 5534 198",
    ),
    "fence": (4, "6bc2c714960a94e3", "198 3251"),
    "required": (
        91,
        "e2c3dc236d94164a",
        "1008 2403 387 42070 472 1268 20960 79535 28 20331 16518 3900 44322 2390 7697 306 276 2897 3996 13",
    ),
    "none": (
        95,
        "efabd595d24633a1",
        "1008 2403 387 42070 472 1268 20960 79535 28 13871 16518 3900 44322 5795 2390 1178 7697 306 276 2897 3996 13",
    ),
    "json": (
        162,
        "a88696fd119e35ca",
        "1008 2403 387 42070 472 1268 12092 15764 129392 9318 16518 12080 4503 2746 413 10872 11419 1544 2932 66661 "
        "3253 13825 347 3251 5534 8 528 1178 6031 44768 13",
    ),
}


@pytest.mark.parametrize("name", PROTOCOL)
def test_protocol_strings(tokenizer, name):
    length, digest, text = PROTOCOL[name]
    ids = [int(i) for i in text.split()]
    data = tokenizer.decode_bytes(ids)
    assert (len(data), hashlib.sha256(data).hexdigest()[:16]) == (length, digest)
    assert tokenizer.encode(data.decode()) == ids


def check_streaming(tokenizer, text: str) -> None:
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(i) for i in tokenizer.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_streaming_of_the_released_vocabulary(tokenizer):
    check_streaming(tokenizer, "你好 🙂 ok 𠮷")


def test_streaming_of_bytes_cut_short():
    check_streaming(ByteTokenizer(256), "你好 🙂 ok 𠮷")
    stream = StreamDecoder(ByteTokenizer(256))
    assert stream.push(0xE4) == "" and stream.finish() == "\ufffd"
    assert ByteTokenizer(256).decode([0x41, 0xE4, 0xBD]) == "A\ufffd"


def test_slices():
    assert list(slices("")) == []
    assert list(slices("a" * 25_000)) == ["a" * 25_000]
    assert [len(s) for s in slices("a" * 25_001)] == [25_000, 1]
    assert [len(s) for s in slices("x " + "a" * 60 + " " * 30, max_run=25)] == [27, 25, 35, 5]
    text = "ab c" * 200_000
    pieces = list(slices(text))
    assert "".join(pieces) == text and [len(p) for p in pieces] == [400_000, 400_000]


def test_long_runs_do_not_stall(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a" * 200_000)) == "a" * 200_000


def test_bytes():
    tokenizer = load_tokenizer(None, 260)
    assert isinstance(tokenizer, ByteTokenizer) and tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.decode([104, 105, 258]) == "hi<|reserved_token_258|>"
    assert tokenizer.decode(tokenizer.encode("a\ud83d")) == "a\ufffd"  # half a surrogate pair, as JSON can hold
    with pytest.raises(ConfigError, match="token id = 260"):
        tokenizer.decode([260])
    with pytest.raises(ConfigError, match=r"byte 195 \(0xc3\) at position 1.*vocab_size = 128"):
        load_tokenizer("bytes", 128).encode("xé")


def test_which_tokenizer(tmp_path):
    assert isinstance(load_tokenizer(tmp_path, 512), ByteTokenizer)  # a checkpoint without a tokenizer file
    with pytest.raises(ConfigError, match=r"vocab_size = 513.*tiktoken.model"):
        load_tokenizer(None, 513)
    with pytest.raises(ConfigError, match="no such file"):
        load_tokenizer(tmp_path / "absent.model", 512)
    lines = [base64.b64encode(bytes([b])) + b" %d" % b for b in range(256)] + [base64.b64encode(b"ab") + b" 256"]
    path = tmp_path / "tiktoken.model"
    path.write_bytes(b"\n".join(lines) + b"\n")
    small = load_tokenizer(tmp_path, 513)
    assert small.encode("abc[EOS]", allow_special=True) == [256, ord("c"), 258]
    with pytest.raises(ConfigError, match="513 ids: expected at most vocab_size = 512"):
        load_tokenizer(path, 512)
    for wrong in (b"!! 0\n", b"YQ== x\n", b"YQ== 0\n"):
        path.write_bytes(wrong)
        with pytest.raises(ConfigError, match="tiktoken.model"):
            load_tokenizer(path, 512)
