"""ChatTemplate: a conversation as the ids of a prompt that ends in the assistant's turn.

A checkpoint's Jinja template runs in jinja2's sandbox with the helpers that Hugging Face templates expect. Special
tokens that the template itself writes become ids; the same text inside a message stays text. Knows nothing of HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crucible.errors import CheckpointError, RequestError
from crucible.json_file import read_json, shown

if TYPE_CHECKING:
    import jinja2

    from crucible.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant")
TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
TOKEN_VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_FIRST_STAND_IN = 0xF0000
"""A private-use plane: no text means anything by these code points."""


class ChatTemplate:
    """A compiled template, or without a source the plain transcript for base models. Safe to share between threads.

    ``variables``: what a template may read besides the messages, such as ``bos_token``. Raises CheckpointError when
    the source is not a template.
    """

    def __init__(self, source: str | None = None, variables: Mapping[str, str] | None = None) -> None:
        self.is_plain = source is None
        self._source = source or ""
        self._variables = dict(variables or {})
        self._template = None if source is None else _compile(source)
        self._guard: _Guard | None = None

    @classmethod
    def for_checkpoint(cls, directory: str | Path, tokenizer: Tokenizer | None = None) -> ChatTemplate:
        """``chat_template.jinja``, else the one in ``tokenizer_config.json``, else the plain transcript.

        ``tokenizer``, when given, is the one that ``encode`` will be called with: its tables are made now. Raises
        CheckpointError naming the file that cannot be used.
        """
        path = Path(directory) / TEMPLATE_FILE
        config_path = Path(directory) / CONFIG_FILE
        config = read_json(config_path) if config_path.is_file() else {}
        try:
            variables = _token_texts(config)
            source = None if path.is_file() else _chosen_template(config.get("chat_template"))
        except CheckpointError as error:
            raise CheckpointError(f"{config_path}: {error}") from None
        try:
            if path.is_file():
                source = path.read_text(encoding="utf-8")
            template = cls(source, variables)
        except (OSError, UnicodeDecodeError, CheckpointError) as error:
            raise CheckpointError(f"{path if path.is_file() else config_path}: {error}") from None
        if tokenizer is not None:
            template._guard = _Guard(tokenizer)
        return template

    def encode(self, messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer) -> list[int]:
        """The ids of the prompt. A last message by the assistant is continued, any other is answered.

        Raises RequestError (param ``messages``) for a wrong shape or role, or when the template refuses the
        conversation; TokenizerError for text that the vocabulary cannot represent.
        """
        checked = _checked(messages)
        if self._template is None:
            return tokenizer.encode_prompt(transcript(checked))
        guard = self._guard
        if guard is None or guard.tokenizer is not tokenizer:
            guard = self._guard = _Guard(tokenizer)
        texts = [message["content"] for message in checked]
        mark, *stand_ins = _unused_characters(1 + len(guard.characters), [self._source, *texts])
        hidden = dict(zip(guard.characters, stand_ins, strict=True))
        shown = {ord(stand_in): character for character, stand_in in hidden.items()}
        guarded = [{**message, "content": guard.hide(message["content"], hidden)} for message in checked]
        rendered = self._rendered(guarded, mark)
        ids: list[int] = []
        for part in tokenizer.split_special(rendered):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += tokenizer.encode(part.translate(shown))
        if not ids:
            raise _refusal("the chat template renders them to nothing")
        return ids

    def _rendered(self, messages: list[dict[str, str]], mark: str) -> str:
        """The prompt's text; ``mark`` is a character that finds the end of a message that is to be continued."""
        continued = messages[-1]["role"] == "assistant"
        if continued:  # the space after the mark tells whether the template trims its messages
            messages[-1]["content"] += mark + " "
        text = self._run(messages, add_generation_prompt=not continued)
        if not continued:
            return text
        end = text.rfind(mark)
        if end < 0:
            raise _refusal("the chat template leaves out the assistant's last message, which cannot be continued")
        return text[:end] if text[end + 1 : end + 2] == " " else text[:end].rstrip()

    def _run(self, messages: list[dict[str, str]], **flags: bool) -> str:
        assert self._template is not None
        try:
            return self._template.render(messages=messages, tools=None, documents=None, **flags, **self._variables)
        except Exception as error:  # whatever the checkpoint's program does wrong, it is not our traceback
            reason = " ".join(str(error).split()) or type(error).__name__
            raise _refusal(f"the chat template refuses them: {reason}") from None


class _Guard:
    """Keeps text inside messages from becoming special tokens.

    In each message the first character of every special token's text is replaced by a stand-in, as is a character at
    either end that could belong to one together with the template's own text. Stand-ins are turned back after the
    rendered text has been cut at its special tokens. The length of a message does not change, nor its white space.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._texts = list(tokenizer.special_tokens)
        self._beginnings = {text[:cut] for text in self._texts for cut in range(1, len(text))}
        self._endings = {text[cut:] for text in self._texts for cut in range(1, len(text))}
        self._longest = max(map(len, self._texts), default=0)
        self.characters = sorted({character for text in self._texts for character in text})

    def hide(self, content: str, stand_ins: Mapping[str, str]) -> str:
        places = set()
        for text in self._texts:
            place = content.find(text)
            while place >= 0:
                places.add(place)
                place = content.find(text, place + 1)
        start = len(content) - len(content.lstrip())
        end = len(content.rstrip())
        for length in range(1, min(self._longest, end - start + 1)):
            if content[end - length : end] in self._beginnings:
                places.add(end - length)
            if content[start : start + length] in self._endings:
                places.add(start)
        if 0 < end - start < self._longest and any(content[start:end] in text for text in self._texts):
            places.add(start)
        if not places:
            return content
        characters = list(content)
        for place in places:
            characters[place] = stand_ins[characters[place]]
        return "".join(characters)


def transcript(messages: Iterable[Mapping[str, str]]) -> str:
    """The plain transcript: ``System: …``, ``User: …`` and ``Assistant: …`` paragraphs, the last one the assistant's.

    No space follows the last colon: the space belongs to the model's first word.
    """
    turns = [(message["role"].capitalize(), message["content"]) for message in messages]
    if turns[-1][0] != "Assistant":
        turns.append(("Assistant", ""))
    return "\n\n".join(f"{label}: {content}" if content else f"{label}:" for label, content in turns)


def _refusal(reason: str) -> RequestError:
    return RequestError(f"messages: {reason}", param="messages")


def _checked(messages: Any) -> list[dict[str, str]]:
    """Copies of ``messages`` that hold a known role and a text, and nothing else."""
    from crucible.tokenizer import without_surrogates

    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise _refusal("must be a list of at least one message")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _refusal(f"[{index}] must be an object with role and content")
        if unknown := [key for key in message if key not in ("role", "content")]:
            raise _refusal(f"[{index}] has {shown(unknown[0])}, which is not supported; a message has role and content")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise _refusal(f"[{index}].role is {shown(role)}; it must be one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise _refusal(f"[{index}].content must be a string")
        checked.append({"role": str(role), "content": without_surrogates(content)})
    return checked


def _unused_characters(count: int, texts: Sequence[str]) -> list[str]:
    used = set().union(*texts)
    found: list[str] = []
    point = _FIRST_STAND_IN
    while len(found) < count:
        if chr(point) not in used:
            found.append(chr(point))
        point += 1
    return found


def _chosen_template(entry: Any) -> str | None:
    """``chat_template`` of tokenizer_config.json: a text, or a list of named ones of which ``default`` counts.

    Raises CheckpointError for anything else: a model that has a template must not get the plain transcript.
    """
    if entry is None or isinstance(entry, str):
        return entry
    if not isinstance(entry, list):
        raise CheckpointError(f"chat_template must be a text or a list of named ones, got {shown(entry)}")
    named: dict[str, str] = {}
    for item in entry:
        name, template = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise CheckpointError(f"chat_template holds {shown(item)}, which lacks a name or a template")
        named[name] = template
    if "default" not in named:
        raise CheckpointError(
            f"chat_template has no template named 'default'; it has {shown(list(named))}: rename one of them"
        )
    return named["default"]


def _token_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like: a text, an object with the text as ``content``, or null."""
    texts: dict[str, str] = {}
    for name in TOKEN_VARIABLES:
        if (entry := config.get(name)) is None:
            continue
        text = entry.get("content") if isinstance(entry, dict) else entry
        if not isinstance(text, str):
            raise CheckpointError(f"{name} must be a text or an object with its content, got {shown(entry)}")
        texts[name] = text
    return texts


def _compile(source: str) -> jinja2.Template:
    """The template in a sandbox with the settings, filters and tags of Hugging Face's ``apply_chat_template``."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks what the assistant wrote, for training: here it is just its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
               sort_keys: bool = False) -> str:  # fmt: skip
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        place = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise CheckpointError(f"the chat template is not valid Jinja: {error}{place}") from None
