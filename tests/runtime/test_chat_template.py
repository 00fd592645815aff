"""Chat templates, checked against transformers' `apply_chat_template` on the same folder, and hostile ones."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from draftc.runtime.chat_template import ChatTemplate
from draftc.runtime.errors import BundleError, UsageError
from draftc.runtime.text import Tokenizer

CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is string %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- for part in message.content or [] %}{{ part.text }}{% endfor %}
        {%- for call in message.tool_calls or [] %}{{ call | tojson(indent=1) }}{% endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

INST = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system, turns = messages[0]['content'], messages[1:] %}
{%- else %}
    {%- set system, turns = '', messages %}
{%- endif %}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must\\ntake turns') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + (system + ' ' if loop.first else '') + message['content'].strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'].strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""

HEADERS = """{{ bos_token }}{% set ns = namespace(turns=0) %}
{% for message in messages %}
    {% if message.role == 'ignored' %}{% continue %}{% endif %}
    {% set ns.turns = ns.turns + 1 %}
    {% if message.role == 'assistant' %}
        {% generation %}
<|{{ message.role }}|>

{{ message.content | trim }}<|eot|>
        {% endgeneration %}
    {% else %}
<|{{ message.role }}|>

{{ message.content | trim }}<|eot|>
    {% endif %}
{% endfor %}
{{ ns.turns }}{% if date_string is defined %} on {{ date_string }}{% endif %}
{% if add_generation_prompt %}<|assistant|>{% endif %}

"""

TEMPLATES = {"chatml": CHATML, "inst": INST, "headers": HEADERS}

CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "the fox"}],
    "turns": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": " hello <b>&amp;</b> 😀 "},
        {"role": "assistant", "content": "world\n"},
        {"role": "user", "content": "你好"},
    ],
    "template syntax in a message": [{"role": "user", "content": "{{ 1 + 1 }}{% raw %}<|im_end|><s>"}],
}


@pytest.fixture
def folders(byte_level_folder: Path, llama_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """A tokenizer folder of either kind, with files and tokenizer_config.json entries added."""

    def make(kind: str, files: dict[str, str] | None = None, **config: Any) -> Path:
        source = {"byte_level": byte_level_folder, "llama": llama_folder}[kind]
        for path in source.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        settings = json.loads((source / "tokenizer_config.json").read_text())
        if kind == "byte_level":
            settings["bos_token"] = "<|endoftext|>"
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | config))
        for name, text in (files or {}).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path

    return make


def render(template: str, messages: Any = CHATS["one"], **variables: Any) -> str:
    return ChatTemplate(template, "chat_template.jinja").render(messages, variables)


class TestAsTransformers:
    @pytest.mark.parametrize("kind", ["byte_level", "llama"])
    @pytest.mark.parametrize("chat", CHATS)
    @pytest.mark.parametrize("name", TEMPLATES)
    def test_ids(self, folders: Callable[..., Path], kind: str, name: str, chat: str) -> None:
        folder = folders(kind, {"chat_template.jinja": TEMPLATES[name]})
        ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
        for prompt in (True, False):
            expected = theirs.apply_chat_template(CHATS[chat], add_generation_prompt=prompt, return_dict=False)
            assert ours.apply_chat_template(CHATS[chat], add_generation_prompt=prompt) == expected
            text = theirs.apply_chat_template(CHATS[chat], add_generation_prompt=prompt, tokenize=False)
            assert ours.render_chat(CHATS[chat], add_generation_prompt=prompt) == text

    def test_bos_is_there_once(self, folders: Callable[..., Path]) -> None:
        """The post-processor of this tokenizer adds BOS to a plain prompt, and so does the template to a chat."""
        tokenizer = Tokenizer.from_folder(folders("llama", {"chat_template.jinja": INST}))
        assert tokenizer.encode("fox")[0] == 1
        assert tokenizer.apply_chat_template(CHATS["one"]).count(1) == 1
        without = Tokenizer.from_folder(folders("llama", {"chat_template.jinja": CHATML}))
        assert without.apply_chat_template(CHATS["one"]).count(1) == 0

    def test_tools_tool_calls_and_switches(self, folders: Callable[..., Path]) -> None:
        folder = folders("byte_level", {"chat_template.jinja": CHATML})
        ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
        tools: list[Any] = [
            {"type": "function", "function": {"name": "größe<>", "parameters": {"n": [1, 2.5, None, True]}}}
        ]
        chat: list[Any] = [
            {
                "role": "user",
                "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}],
                "name": None,
            },
            {"role": "assistant", "content": None, "tool_calls": [{"name": "größe<>", "arguments": {"n": 1}}]},
        ]
        for tool in (tools, None):
            expected = theirs.apply_chat_template(
                chat, tools=tool, enable_thinking=False, add_generation_prompt=True, tokenize=False
            )
            assert ours.render_chat(chat, tools=tool, enable_thinking=False) == expected
        assert "größe<>" in expected

    @given(contents=st.lists(st.text(max_size=12), min_size=1, max_size=4))
    @settings(deadline=None, max_examples=50)
    def test_any_content(self, chat_pair: tuple[Tokenizer, Any], contents: list[str]) -> None:
        ours, theirs = chat_pair
        chat = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(contents)]
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert ours.apply_chat_template(chat) == expected

    def test_the_date(self) -> None:
        before = datetime.now()
        text = render("{{ strftime_now('%d %b %Y') }}")
        assert text in {moment.strftime("%d %b %Y") for moment in (before, datetime.now())}


@pytest.fixture(scope="session")
def chat_pair(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    folder = tmp_path_factory.mktemp("chat")
    for path in llama_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "chat_template.jinja").write_text(HEADERS)
    return Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)


NAMED = {"default": "D {{ messages[0].content }}", "tool_use": "T {{ messages[0].content }}", "rag": "R"}


class TestWhichTemplate:
    @pytest.mark.parametrize(
        ("files", "config"),
        [
            ({}, {"chat_template": [{"name": k, "template": v} for k, v in NAMED.items()]}),
            (
                {
                    "chat_template.jinja": NAMED["default"],
                    "additional_chat_templates/tool_use.jinja": NAMED["tool_use"],
                    "additional_chat_templates/rag.jinja": NAMED["rag"],
                },
                {},
            ),
        ],
    )
    def test_of_several(self, folders: Callable[..., Path], files: dict[str, str], config: dict[str, Any]) -> None:
        folder = folders("byte_level", files, **config)
        ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
        choices: list[Any] = [None, [{"name": "f"}]]
        for tools in choices:
            expected = theirs.apply_chat_template(CHATS["one"], tools=tools, tokenize=False)
            assert ours.render_chat(CHATS["one"], tools=tools) == expected

    def test_a_mapping_of_several(self, folders: Callable[..., Path]) -> None:
        ours = Tokenizer.from_folder(folders("byte_level", chat_template=NAMED))
        assert ours.render_chat(CHATS["one"]) == "D the fox"

    def test_the_file_wins_over_the_config(self, folders: Callable[..., Path]) -> None:
        folder = folders("byte_level", {"chat_template.jinja": "file"}, chat_template="config")
        assert AutoTokenizer.from_pretrained(folder).apply_chat_template(CHATS["one"], tokenize=False) == "file"
        assert Tokenizer.from_folder(folder).render_chat(CHATS["one"]) == "file"

    def test_none(self, byte_level_folder: Path) -> None:
        tokenizer = Tokenizer.from_folder(byte_level_folder)
        assert not tokenizer.has_chat_template
        with pytest.raises(UsageError, match=r"no default chat template.*plain prompt"):
            tokenizer.apply_chat_template(CHATS["one"])

    def test_no_default_among_several(self, folders: Callable[..., Path]) -> None:
        tokenizer = Tokenizer.from_folder(folders("byte_level", chat_template=[{"name": "rag", "template": "R"}]))
        with pytest.raises(UsageError, match="only rag"):
            tokenizer.apply_chat_template(CHATS["one"])

    @pytest.mark.parametrize("entry", [7, ["x"], [{"name": "default"}], {"default": 7}, [{"template": "x"}]])
    def test_malformed_entries_name_the_file(self, folders: Callable[..., Path], entry: Any) -> None:
        tokenizer = Tokenizer.from_folder(folders("byte_level", chat_template=entry))
        with pytest.raises(BundleError, match=r"tokenizer_config\.json: chat_template"):
            tokenizer.render_chat(CHATS["one"])

    @pytest.mark.parametrize("broken", ["{% for %}", "{{", "{% generation %}", "{{ x | no_such_filter }}"])
    def test_wrong_syntax_names_the_file_and_leaves_plain_prompts_alone(
        self, folders: Callable[..., Path], broken: str
    ) -> None:
        tokenizer = Tokenizer.from_folder(folders("byte_level", {"chat_template.jinja": broken}))
        assert tokenizer.encode("fox")
        with pytest.raises(BundleError, match=r"chat_template\.jinja"):
            tokenizer.render_chat(CHATS["one"])


class TestMessages:
    @pytest.mark.parametrize(
        ("messages", "where"),
        [
            ("hello", "messages must be a list"),
            ({"role": "user", "content": "x"}, "messages must be a list"),
            (None, "messages must be a list"),
            ([], "messages is empty"),
            (["hello"], r"messages\[0\]"),
            ([{"role": "user", "content": "x"}, {"role": "user"}], r'messages\[1\] needs a "content"'),
            ([{"content": "x"}], r'messages\[0\] needs a "role"'),
            ([{"role": None, "content": "x"}], r'messages\[0\] needs a "role"'),
            ([{"role": "user", "content": 5}], r"messages\[0\]"),
            ([{"role": "user", "content": ["x"]}], r"messages\[0\]"),
            ([{"role": "user", "content": b"x"}], r"messages\[0\]\.content"),
            ([{"role": "user", "content": "x", "extra": {"a": [object()]}}], r"messages\[0\]\.extra\.a\[0\]"),
            ([{"role": "user", "content": "x", 3: "y"}], r"messages\[0\]"),
        ],
    )
    def test_malformed_ones_are_named(self, messages: Any, where: str) -> None:
        with pytest.raises(UsageError, match=where):
            render("x", messages)

    def test_endless_nesting(self) -> None:
        message: dict[str, Any] = {"role": "user", "content": "x"}
        message["again"] = message
        with pytest.raises(UsageError, match="nested"):
            render("x", [message])

    def test_a_refusal_of_the_template_is_passed_on_in_one_line(self) -> None:
        chat = [{"role": "assistant", "content": "x"}]
        with pytest.raises(UsageError, match="user and assistant must take turns"):
            render(INST, chat, bos_token="", eos_token="")

    @pytest.mark.parametrize("failing", ["{{ 1 / 0 }}", "{{ nothing.at.all }}", "{{ messages[0] + 1 }}", "{{ f() }}"])
    def test_a_template_that_fails(self, failing: str) -> None:
        with pytest.raises((UsageError, BundleError), match="chat template"):
            render(failing)

    def test_the_callers_messages_stay_as_they_are(self) -> None:
        chat = [{"role": "user", "content": "x", "name": None}]
        render("{{ messages }}", chat)
        assert chat == [{"role": "user", "content": "x", "name": None}]


class TestHostileTemplates:
    @pytest.mark.parametrize(
        "template",
        [
            "{{ ''.__class__.__mro__ }}",
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ (''|attr('__class__')).__mro__ }}",
            "{{ messages.__class__.__base__ }}",
            "{{ cycler.__init__.__globals__.os }}",
            "{{ lipsum.__globals__['os'].popen('id').read() }}",
            "{{ raise_exception.__globals__ }}",
            "{{ strftime_now.__globals__ }}",
            "{{ range.__closure__ }}",
            "{{ namespace.__init__.__globals__ }}",
            "{{ self.__init__.__globals__ }}",
            "{{ dict.mro() }}",
            "{{ '{0.__class__.__mro__}'.format(messages) }}",
            "{{ ('{0.__class__}'|attr('format'))(messages) }}",
            "{{ (['{0.__class__}'.format]|first)(messages) }}",
            "{% set ns = namespace(__html__=1) %}{{ ns.__html__ }}",
            "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
            "{% do messages.append(1) %}{{ messages.append(1) }}",
            "{{ messages.append(1) }}",
            "{{ messages[0].update({'role': 'x'}) }}",
            "{% include '/etc/passwd' %}",
            "{% import 'os' as os %}{{ os }}",
            "{% for i in range(10**9) %}{% endfor %}",
            "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        ],
    )
    def test_is_stopped(self, template: str) -> None:
        with pytest.raises((UsageError, BundleError), match="chat template"):
            render(template)

    def test_an_object_of_the_caller_never_reaches_a_template(self) -> None:
        with pytest.raises(UsageError, match="plain JSON data"):
            render("{{ thing.unlink() }}", thing=Path("important"))

    def test_range_is_a_fresh_allowance_for_each_rendering(self) -> None:
        template = ChatTemplate("{% for i in range(60000) %}{% endfor %}done", "chat_template.jinja")
        assert [template.render(CHATS["one"], {}) for _ in range(3)] == ["done"] * 3
