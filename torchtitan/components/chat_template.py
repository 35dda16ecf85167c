"""Write a conversation as one text, by a template that came with a tokenizer.

Templates are programs of other people, so they run in a sandbox: they see the conversation, the
special tokens and a few functions, and change nothing. The one fact to know: a special token that
the tokenizer lacks is an error where the template writes it, not an empty place in the text.

    template text -> ChatTemplate -> render(messages) -> text -> tokenizer
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# What templates call special tokens. Others may be missing where a template asks with "if".
_USUAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


class ChatTemplate:
    """A template and the special tokens that it may write."""

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ValueError when ``text`` is no template."""
        self.text = text
        self._special_tokens = dict(special_tokens)
        self._compiled: Template | None = None
        try:
            self._template()
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            where = f", line {line}" if line else ""
            raise ValueError(
                f"the chat template is none{where}: {error}. Correct chat_template.jinja, or "
                "chat_template in tokenizer_config.json."
            ) from error

    def _template(self) -> Template:
        if self._compiled is None:
            self._compiled = _environment().from_string(self.text)
        return self._compiled

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text of ``messages``. Raises ValueError with what the template did not like."""
        missing = {
            name: StrictUndefined(name=name)
            for name in _USUAL_TOKENS
            if name not in self._special_tokens
        }
        given = {"add_generation_prompt": False, **missing, **self._special_tokens, **variables}
        try:
            return self._template().render(messages=list(messages), **given)
        except UndefinedError as error:
            lacks = [name for name in missing if f"'{name}'" in str(error)]
            if not lacks:
                raise ValueError(_failed(error)) from error
            raise ValueError(
                f"the chat template writes {lacks[0]}, but the tokenizer has none; it has "
                f"{', '.join(sorted(self._special_tokens)) or 'no special tokens'}. Name it in "
                "tokenizer_config.json or take another template."
            ) from error
        except SecurityError as error:
            raise ValueError(
                f"the chat template does what templates may not do: {error}. Take another one."
            ) from error
        # The rest is whatever the template's own code raises.
        except Exception as error:
            raise ValueError(_failed(error)) from error

    def __getstate__(self) -> dict[str, Any]:
        # A compiled template holds functions that no other process can be given.
        return {**self.__dict__, "_compiled": None}


def _failed(error: Exception) -> str:
    return (
        f"the chat template failed with {type(error).__name__}: {error}. Correct it, or the "
        "conversation that it was given."
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    functions: dict[str, Any] = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    environment.globals.update(functions)
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    # The filter that jinja has escapes signs for HTML.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
