"""The tokenizer folder, checked against transformers' AutoTokenizer and GenerationConfig on the same files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, GenerationConfig

from draftc.runtime.errors import BundleError, UsageError
from draftc.runtime.text import GenerationDefaults, Tokenizer

PROMPTS = ["", "a", "the quick brown fox", " two  spaces", "x\n", "<s>hi</s>", "<|im_start|>user", "你好😀", "<tool> x"]


@pytest.fixture(scope="session", params=["byte_level", "llama"])
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"{request.param}_folder")
    return path


@pytest.fixture(scope="session")
def pair(folder: Path) -> tuple[Tokenizer, Any]:
    return Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def edited(byte_level_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tokenizer folder with files replaced: name → JSON value, or text as it is."""

    def edit(files: dict[str, Any]) -> Path:
        for path in byte_level_folder.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        for name, value in files.items():
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            (tmp_path / name).write_bytes(content)
        return tmp_path

    return edit


class TestEncode:
    @pytest.mark.parametrize("prompt", PROMPTS)
    def test_as_transformers(self, pair: tuple[Tokenizer, Any], prompt: str) -> None:
        ours, theirs = pair
        assert ours.encode(prompt) == theirs(prompt)["input_ids"]

    @given(prompt=st.text(max_size=30))
    @settings(deadline=None)
    def test_any_text_as_transformers(self, pair: tuple[Tokenizer, Any], prompt: str) -> None:
        ours, theirs = pair
        assert ours.encode(prompt) == theirs(prompt)["input_ids"]

    def test_bos_comes_once_and_only_where_the_checkpoint_adds_it(
        self, byte_level_folder: Path, llama_folder: Path
    ) -> None:
        with_bos = Tokenizer.from_folder(llama_folder)
        assert with_bos.encode("fox").count(1) == 1
        assert with_bos.encode("fox")[0] == 1
        assert with_bos.encode("") == [1]
        assert Tokenizer.from_folder(byte_level_folder).encode("") == []

    @pytest.mark.parametrize("add_bos", [True, False, None])
    @pytest.mark.parametrize("kind", ["byte_level", "llama"])
    def test_add_bos_token_as_saved_by_transformers(
        self, request: pytest.FixtureRequest, tmp_path: Path, kind: str, add_bos: bool | None
    ) -> None:
        source: Path = request.getfixturevalue(f"{kind}_folder")
        options = {} if add_bos is None else {"add_bos_token": add_bos}
        loaded: Any = AutoTokenizer.from_pretrained(source, bos_token="<|im_start|>" if kind == "byte_level" else "<s>")
        if options:
            loaded.add_bos_token = add_bos
        loaded.save_pretrained(tmp_path)
        ours = Tokenizer.from_folder(tmp_path)
        expected = AutoTokenizer.from_pretrained(tmp_path)("the fox")["input_ids"]
        assert expected == loaded("the fox")["input_ids"]
        assert ours.encode("the fox") == expected

    def test_add_bos_token_beside_tokenizer_json_is_not_read(self, edited: Callable[..., Path]) -> None:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "add_bos_token": True}
        folder = edited({"tokenizer_config.json": config})
        expected = AutoTokenizer.from_pretrained(folder)("fox")["input_ids"]
        assert Tokenizer.from_folder(folder).encode("fox") == expected

    def test_nothing_is_truncated_or_padded(self, byte_level_folder: Path, edited: Callable[..., Path]) -> None:
        raw = json.loads((byte_level_folder / "tokenizer.json").read_text())
        raw["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
        raw["padding"] = {
            "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
        }  # fmt: skip
        plain = Tokenizer.from_folder(byte_level_folder)
        carrying = Tokenizer.from_folder(edited({"tokenizer.json": raw}))
        for prompt in ("a", "the quick brown fox jumps over"):
            assert carrying.encode(prompt) == plain.encode(prompt)

    @pytest.mark.parametrize("split", [True, False])
    def test_split_special_tokens(self, edited: Callable[..., Path], split: bool) -> None:
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "split_special_tokens": split,
        }
        folder = edited({"tokenizer_config.json": config})
        ids = Tokenizer.from_folder(folder).encode("fox<|im_end|>")
        assert ids == AutoTokenizer.from_pretrained(folder)("fox<|im_end|>")["input_ids"]
        assert (ids[-1] != 2) is split

    @pytest.mark.parametrize("prompt", [None, 3, b"bytes", ["a"], "\ud800"])
    def test_what_is_not_text_is_refused(self, byte_level_folder: Path, prompt: str) -> None:
        with pytest.raises(UsageError, match="prompt"):
            Tokenizer.from_folder(byte_level_folder).encode(prompt)


class TestDecode:
    @given(fractions=st.lists(st.floats(0, 0.999), max_size=30))
    @settings(deadline=None)
    def test_any_ids_as_transformers(self, pair: tuple[Tokenizer, Any], fractions: list[float]) -> None:
        ours, theirs = pair
        ids = [int(fraction * ours.vocab_size) for fraction in fractions]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)

    def test_padding_rows_have_no_text(self, pair: tuple[Tokenizer, Any]) -> None:
        ours, _ = pair
        ids = ours.encode("fox")
        assert ours.decode([*ids, ours.vocab_size + 5]) == ours.decode(ids)

    @pytest.mark.parametrize("ids", [[-1], [2**40], ["x"]])
    def test_what_is_no_id_is_refused(self, byte_level_folder: Path, ids: list[int]) -> None:
        with pytest.raises(UsageError, match="token ids"):
            Tokenizer.from_folder(byte_level_folder).decode(ids)

    def test_token_text(self, byte_level_folder: Path, llama_folder: Path) -> None:
        chatml, llama = Tokenizer.from_folder(byte_level_folder), Tokenizer.from_folder(llama_folder)
        assert [chatml.token_text(i) for i in chatml.encode("fox the<|im_end|>")][-2:] == [" the", "<|im_end|>"]
        assert [llama.token_text(i) for i in llama.encode("the fox")] == ["<s>", " the", " fox"]
        assert chatml.token_text(chatml.encode("🦄")[0]) == "\ufffd"
        assert llama.token_text(3 + 0x0A) == "\n"
        assert chatml.token_text(10_000) == llama.token_text(10_000) == ""


class TestMalformedFolder:
    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("tokenizer.json", b""),
            ("tokenizer.json", b"{}"),
            ("tokenizer.json", b"\xff\xfe"),
            ("tokenizer.json", b"[" * 100_000),
            ("tokenizer_config.json", b"{"),
            ("tokenizer_config.json", b"[]"),
            ("tokenizer_config.json", b"\xff"),
            ("tokenizer_config.json", b"[" * 100_000),
            ("tokenizer_config.json", {"eos_token": 7}),
            ("tokenizer_config.json", {"eos_token": {"content": 7}}),
            ("generation_config.json", b"null"),
            ("generation_config.json", b'{"temperature": }'),
            ("generation_config.json", b" " * (17 << 20)),
        ],
    )
    def test_the_file_is_named(self, edited: Callable[..., Path], name: str, content: Any) -> None:
        folder = edited({name: content})
        with pytest.raises(BundleError, match=str(folder / name)) as caught:
            Tokenizer.from_folder(folder)
        assert "\n" not in str(caught.value)

    def test_without_tokenizer_json(self, tmp_path: Path) -> None:
        with pytest.raises(BundleError, match=r"tokenizer\.json"):
            Tokenizer.from_folder(tmp_path)

    def test_a_post_processor_that_would_crash_later(
        self, byte_level_folder: Path, edited: Callable[..., Path]
    ) -> None:
        raw = json.loads((byte_level_folder / "tokenizer.json").read_text())
        missing = {"SpecialToken": {"id": "<missing>", "type_id": 0}}
        raw["post_processor"] = {"type": "TemplateProcessing", "single": [missing], "pair": [], "special_tokens": {}}
        with pytest.raises(BundleError, match=r"tokenizer\.json"):
            Tokenizer.from_folder(edited({"tokenizer.json": raw}))

    def test_only_tokenizer_json_is_needed(self, byte_level_folder: Path, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_bytes((byte_level_folder / "tokenizer.json").read_bytes())
        tokenizer = Tokenizer.from_folder(tmp_path)
        assert tokenizer.decode(tokenizer.encode("fox")) == "fox"
        assert tokenizer.defaults == GenerationDefaults()


def defaults(folder: Path, config: dict[str, Any]) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return GenerationDefaults.from_folder(folder)


class TestGenerationDefaults:
    @pytest.mark.parametrize(
        "config",
        [
            {},
            {"do_sample": True},
            {"do_sample": False, "temperature": 0.7, "top_p": 0.8},
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
            {"do_sample": True, "top_k": 0, "repetition_penalty": 1.1},
            {"do_sample": True, "top_k": 20, "top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.05},
            {"do_sample": True, "top_k": None, "temperature": None, "top_p": None, "min_p": 0.05},
            {"repetition_penalty": 1.3, "max_new_tokens": 9},
        ],
    )
    def test_as_generate_completes_the_file(self, tmp_path: Path, config: dict[str, Any]) -> None:
        ours = defaults(tmp_path, config)
        theirs: Any = GenerationConfig.from_pretrained(tmp_path)
        theirs.update(**theirs._get_default_generation_params(), defaults_only=True)
        assert ours.do_sample == theirs.do_sample
        assert ours.temperature == (theirs.temperature if theirs.do_sample else 0.0)
        assert ours.top_k == theirs.top_k
        assert ours.top_p == theirs.top_p
        assert ours.min_p == (theirs.min_p or 0.0)
        assert ours.repetition_penalty == theirs.repetition_penalty
        assert ours.max_new_tokens == theirs.max_new_tokens

    @pytest.mark.parametrize(
        ("value", "ids"), [(5, (5,)), ([5], (5,)), ([5, 2, 5], (5, 2)), ([], ()), (None, ()), (-1, ()), ([-1, 3], (3,))]
    )
    def test_end_tokens(self, tmp_path: Path, value: Any, ids: tuple[int, ...]) -> None:
        assert defaults(tmp_path, {"eos_token_id": value}).eos_token_ids == ids

    def test_named_tokens_stand_in_for_missing_ids(self, llama_folder: Path) -> None:
        given_by_tokenizer = Tokenizer.from_folder(llama_folder).defaults
        assert given_by_tokenizer.eos_token_ids == (2,)
        assert given_by_tokenizer.bos_token_id == 1
        assert given_by_tokenizer.pad_token_id is None

    def test_the_file_wins_over_the_tokenizer(self, edited: Callable[..., Path]) -> None:
        folder = edited({"generation_config.json": {"eos_token_id": [0, 2], "pad_token_id": 7}})
        found = Tokenizer.from_folder(folder).defaults
        assert (found.eos_token_ids, found.pad_token_id) == ((0, 2), 7)

    def test_an_end_token_that_the_vocabulary_lacks_is_none(self, edited: Callable[..., Path]) -> None:
        folder = edited({"tokenizer_config.json": {"eos_token": "<not there>"}})
        assert Tokenizer.from_folder(folder).defaults.eos_token_ids == ()

    @pytest.mark.parametrize(
        ("field", "values"),
        [
            ("eos_token_id", ["2", 1.5, True, [1, None], {"id": 2}, [10**400]]),
            ("bos_token_id", ["2", True]),
            ("do_sample", [1, "true"]),
            ("temperature", [-0.1, "hot", True, float("nan"), float("inf"), [1.0], 10**400]),
            ("top_k", [-1, 2.5, "5", True, 10**400]),
            ("top_p", [0, 0.0, 1.01, -1, "1"]),
            ("min_p", [-0.1, 1.5, "0"]),
            ("repetition_penalty", [0, -1, "1", float("inf")]),
            ("max_new_tokens", [0, -3, 1.5, "8", 10**400]),
        ],
    )
    def test_malformed_values_are_named(self, tmp_path: Path, field: str, values: list[Any]) -> None:
        for value in values:
            with pytest.raises(BundleError, match=rf"generation_config\.json: {field} must be") as caught:
                defaults(tmp_path, {field: value, "do_sample": True} if field != "do_sample" else {field: value})
            assert len(str(caught.value)) < len(str(tmp_path)) + 200, "a hostile value is not printed in full"
