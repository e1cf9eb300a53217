"""The template: what turns a conversation or a text into tokens and labels, and tokens into text again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from twinkle.data_format import IGNORE_INDEX, InputFeature
from twinkle.errors import ConfigError, DataError
from twinkle.template.features import Tokens, build_features, cut_feature
from twinkle.template.masks import Turn, find_turns, marked_turns, put_back
from twinkle.template.messages import (
    check_rounds,
    message_weight,
    normalise_messages,
    normalise_tools,
    read_messages,
    trained_turns,
)
from twinkle.template.reasoning import REASONING_CHOICES, keep_reasoning, note_lost_reasoning, strip_reasoning
from twinkle.template.rendering import ChatRenderer, check_rendered, fit_content, fit_tool_calls
from twinkle.template.tokenizers import fit_tokenizer, load_tokenizer, read_chat_template
from twinkle.template.tokens import tokenize_spans
from twinkle.template.truncation import check_truncation

__all__ = ['Template']

_CONSUMED = ('messages', 'text', 'tools', 'system')


class Template:
    """Rows to `InputFeature`s, for any tokenizer and chat template.

    A row is one of

    * a conversation, `{'messages': [...], 'tools': [...], 'system': '...'}`: trained is what the assistant says,
      which is all that follows the generation prompt in the rendered text (content, tool calls, and reasoning where
      the chat template or `reasoning` keeps it) up to and with the end-of-turn text. White space behind that end is
      not trained. A chat template's own `{% generation %}` marks go before. Per message, `train` (true or false)
      overrides `rounds`, and `weight` fills `loss_weights`;
    * a text, `{'text': '...'}`: trained is every token, the end token appended included;
    * a feature, with `input_ids` and, if it has any, `labels` shifted already: passed through, truncated like the
      others.

    Where a row has several, `input_ids` goes before `messages` before `text`. Other keys of the row are passed on
    unchanged. `labels[t]` is the target of position t: the token at t + 1, or -100; the last is -100. Rows are never
    changed.

    Args:
        model_id: a folder, or an id of any source that `twinkle.hub` knows. Its tokenizer is loaded when first needed.
        tokenizer: a tokenizer instead of loading one. It is copied before anything about it is changed.
        max_length: the longest row allowed, in tokens.
        truncation: for longer rows: 'raise'; 'right' and 'left' cut that side off; 'delete' drops the row; 'split'
            makes several of it.
        system: the system prompt of conversations that have none. Left out, the chat template's own default stands.
        rounds: the rounds trained on: 'all', 'last', or their numbers (0 the first, -1 the last). A round is what the
            assistant says between two user messages.
        reasoning: 'template' leaves it to the chat template; 'strip' takes it out of all rounds but the last; 'keep'
            keeps and trains it in all of them, also where the chat template would strip it.
        chat_template: Jinja text (or a file of it) in place of the tokenizer's own.
        chat_template_kwargs: variables for the chat template, such as `{'enable_thinking': False}`.
        add_eos: whether texts are closed by the end token.
        revision: branch, tag or commit of `model_id`.
        trust_remote_code: whether a tokenizer may bring its own code.

    Raises:
        ConfigError: an option has a value that cannot work.
    """

    default_chat_template: ClassVar[str | None] = None
    """Jinja text for tokenizers that have no chat template."""

    def __init__(
        self,
        model_id: str | Path | None = None,
        *,
        tokenizer: Any = None,
        max_length: int | None = None,
        truncation: str = 'raise',
        system: str | None = None,
        rounds: str | Sequence[int] = 'all',
        reasoning: str = 'template',
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_eos: bool = True,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if model_id is None and tokenizer is None:
            raise ConfigError(
                "A template needs a tokenizer: pass model_id='hf://org/name', a local folder, or tokenizer=..."
            )
        if model_id is not None and not isinstance(model_id, (str, Path)):
            raise ConfigError(
                f'model_id is {type(model_id).__name__}; it must be text. Pass a tokenizer as tokenizer=...'
            )
        if isinstance(tokenizer, (str, Path)):
            raise ConfigError(f'tokenizer={str(tokenizer)!r} is text; pass it as model_id, or pass a tokenizer object.')
        if reasoning not in REASONING_CHOICES:
            raise ConfigError(f'reasoning={reasoning!r}; it must be one of {", ".join(map(repr, REASONING_CHOICES))}.')
        if system is not None and not isinstance(system, str):
            raise ConfigError(f'system is {type(system).__name__}; it must be text.')
        check_truncation(truncation, max_length)
        self.model_id = None if model_id is None else str(model_id)
        self.max_length = max_length
        self.truncation = truncation
        self.system = system
        self.rounds = check_rounds(rounds)
        self.reasoning = reasoning
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.add_eos = add_eos
        self.revision = revision
        self.trust_remote_code = trust_remote_code
        self._chat_template = read_chat_template(chat_template)
        self._given = tokenizer
        self._tokenizer: Any = None
        self._renderer: ChatRenderer | None = None

    def __repr__(self) -> str:
        name = self.model_id or type(self._given).__name__
        return f'{type(self).__name__}({name!r}, max_length={self.max_length}, truncation={self.truncation!r})'

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_renderer': None}

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, loaded when first asked for, with a pad token out of its own vocabulary.

        Raises:
            ConfigError: no token can pad.
            SourceError, UntrustedCodeError, MissingPackageError: it cannot be loaded.
        """
        if self._tokenizer is None:
            owned = self._given is None
            loaded = self._given
            if owned:
                assert self.model_id is not None
                loaded = load_tokenizer(self.model_id, revision=self.revision, trust_remote_code=self.trust_remote_code)
            chat_template = self._chat_template
            if chat_template is None and not getattr(loaded, 'chat_template', None):
                chat_template = self.default_chat_template
            self._tokenizer = fit_tokenizer(loaded, chat_template=chat_template, owned=owned)
        return self._tokenizer

    @property
    def pad_token_id(self) -> int:
        """The id to pad with. It may be the end token's: pads are told apart by the attention mask and the labels."""
        return int(self.tokenizer.pad_token_id)

    @property
    def renderer(self) -> ChatRenderer:
        """Renders conversations with this template's chat template."""
        if self._renderer is None:
            self._renderer = ChatRenderer(self.tokenizer, self.chat_template_kwargs)
        return self._renderer

    def encode(self, row: Mapping[str, Any]) -> list[InputFeature]:
        """The features of one row: one; none under truncation='delete'; several under 'split'.

        Raises:
            DataError: the row cannot be encoded, or nothing of it would be trained on; the reason is named.
            SampleTooLongError: the row is too long, under truncation='raise'.
            ConfigError: the row has messages, and there is no chat template.
        """
        if not isinstance(row, Mapping):
            raise DataError(f'A row is a mapping with "messages" or "text", not {type(row).__name__}.')
        if row.get('input_ids') is not None:
            return cut_feature(row, self.max_length, self.truncation)
        extras = {key: value for key, value in row.items() if key not in _CONSUMED}
        if row.get('messages') is not None:
            tokens = self._encode_messages(row)
        elif row.get('text') is not None:
            tokens = self._encode_text(row['text'])
        else:
            raise DataError(
                f'The row has neither "messages" nor "text" (keys: {sorted(map(str, row))}). Map it to one of them, '
                'with a preprocessor for instance.'
            )
        return build_features(tokens, extras, self.max_length, self.truncation)

    def batch_encode(self, rows: Sequence[Mapping[str, Any]]) -> list[InputFeature]:
        """The features of many rows, in order. Raises what `encode` raises, naming the row."""
        features: list[InputFeature] = []
        for index, row in enumerate(rows):
            try:
                features.extend(self.encode(row))
            except DataError as error:
                raise type(error)(f'Row {index}: {error}') from error
        return features

    def encode_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> list[int]:
        """The tokens that ask the assistant to go on after `messages`, the generation prompt included.

        Raises:
            DataError: messages that the chat template does not take.
            ConfigError: there is no chat template.
        """
        tools = normalise_tools(tools)
        plain, placeholders = self._prepare(normalise_messages(read_messages(messages), system=self.system), tools)
        text = self.renderer.render(plain, tools, prompt=True)
        check_rendered(text, plain)
        text, _ = put_back(text, [], placeholders)
        return tokenize_spans(self.tokenizer, text, [])[0]

    def decode(self, ids: Any, **kwargs: Any) -> str:
        """The text of tokens (a list or a tensor). Positions of -100 are left out, so that labels can be read.

        `kwargs` go to the tokenizer's `decode`, such as `skip_special_tokens=True`.
        """
        flat = ids.tolist() if hasattr(ids, 'tolist') else [ids] if isinstance(ids, int) else list(ids)
        kwargs.setdefault('clean_up_tokenization_spaces', False)
        return str(self.tokenizer.decode([int(token) for token in flat if token != IGNORE_INDEX], **kwargs))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the tokenizer and its chat template into `folder`, as plain Transformers reads them."""
        self.tokenizer.save_pretrained(str(folder))

    def _prepare(
        self, messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The messages as the chat template reads them, with placeholders for reasoning that it would drop."""
        renderer = self.renderer
        messages = fit_tool_calls(renderer, fit_content(renderer, messages, tools), tools)
        if self.reasoning == 'strip':
            return strip_reasoning(messages), {}
        if self.reasoning == 'keep':
            return keep_reasoning(renderer, messages, tools)
        note_lost_reasoning(renderer, tools, messages)
        return messages, {}

    def _encode_messages(self, row: Mapping[str, Any]) -> Tokens:
        """The tokens of a conversation, trained on where the assistant speaks."""
        given = read_messages(row['messages'])
        tools = normalise_tools(row.get('tools'))
        plain, placeholders = self._prepare(
            normalise_messages(given, system=self.system, row_system=row.get('system')), tools
        )
        inserted = len(plain) - len(given)
        wanted = [index + inserted for index, trained in enumerate(trained_turns(given, self.rounds)) if trained]
        if not wanted:
            raise DataError(
                'No message is trained on: there is no assistant turn, or each has "train": false or lies outside '
                f'rounds={self.rounds!r}. Filter such rows out, or use encode_prompt for prompts.'
            )
        renderer = self.renderer
        text = renderer.render(plain, tools)
        check_rendered(text, plain)
        locate = marked_turns if renderer.has_marks(tools) else find_turns
        text, turns = put_back(text, locate(renderer, text, plain, tools, wanted), placeholders)
        turns = [self._trained_part(text, turn) for turn in turns]
        ids, owners = tokenize_spans(self.tokenizer, text, [(turn.start, turn.end) for turn in turns])
        weights = [message_weight(given[turn.index - inserted]) for turn in turns]
        of_token = None
        if any(weight is not None for weight in weights):
            of_turn = [1.0 if weight is None else weight for weight in weights]
            of_token = [of_turn[owner] if owner >= 0 else 0.0 for owner in owners]
        return Tokens(ids, [owner >= 0 for owner in owners], of_token)

    def _trained_part(self, text: str, turn: Turn) -> Turn:
        """What of a turn is trained on: all of it, unless a subclass knows better."""
        return turn

    def _encode_text(self, text: Any) -> Tokens:
        """The tokens of a text, with what the tokenizer puts around it and the end token: all are trained on."""
        if not isinstance(text, str) or not text:
            raise DataError(f'The text of the row is {text!r:.100}; it must be a string that is not empty.')
        tokenizer = self.tokenizer
        ids = list(tokenizer(text, verbose=False)['input_ids'])
        end = tokenizer.eos_token_id
        if self.add_eos and end is not None and (not ids or ids[-1] != end):
            ids.append(end)
        return Tokens(ids, [True] * len(ids))
