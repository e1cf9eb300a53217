"""Template: options, rows of every kind, truncation, tokens and text."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch

from tests.helpers.tokenizers import CHATML, CHATML_MARKED, tiny_tokenizer
from twinkle.data_format import IGNORE_INDEX
from twinkle.errors import ConfigError, DataError, SampleTooLongError, SourceError
from twinkle.template import Template

CHAT = [{'role': 'user', 'content': 'Who are you?'}, {'role': 'assistant', 'content': 'A small model.'}]
LONG = [{'role': 'user', 'content': 'hello ' * 30}, {'role': 'assistant', 'content': 'A small model.'}]


@pytest.fixture(scope='module')
def tokenizer():
    """A tiny ChatML tokenizer with pad == eos."""
    return tiny_tokenizer()


@pytest.fixture
def template(tokenizer):
    """A template with all defaults."""
    return Template(tokenizer=tokenizer)


def trained(template, feature):
    """The text that the labels of a feature hold."""
    return template.decode([label for label in feature['labels'] if label != IGNORE_INDEX])


class TestRows:
    def test_conversation_becomes_one_shifted_feature(self, template, tokenizer):
        """The tokens are those of the rendered chat, and each label is the next token or -100."""
        (feature,) = template.encode({'messages': CHAT})
        ids = tokenizer.apply_chat_template(CHAT, return_dict=False)
        assert feature['input_ids'] == ids
        assert feature['length'] == len(ids) == len(feature['labels'])
        assert feature['labels'][-1] == IGNORE_INDEX
        assert all(label in (IGNORE_INDEX, ids[t + 1]) for t, label in enumerate(feature['labels'][:-1]))
        assert trained(template, feature) == 'A small model.<|im_end|>'

    def test_text_trains_on_all_tokens_and_ends_in_eos(self, template, tokenizer):
        """Plain text: every token but the first is a target, the end token included, once."""
        for text in ('hello world', 'hello world<|im_end|>'):
            (feature,) = template.encode({'text': text})
            ids = [*tokenizer.encode('hello world'), tokenizer.eos_token_id]
            assert feature['input_ids'] == ids
            assert feature['labels'] == [*ids[1:], IGNORE_INDEX]

    def test_text_without_eos_on_request(self, tokenizer):
        """add_eos=False leaves the text as it is."""
        (feature,) = Template(tokenizer=tokenizer, add_eos=False).encode({'text': 'hello world'})
        assert feature['input_ids'] == tokenizer.encode('hello world')

    def test_feature_passes_through(self, template):
        """A row with input_ids is a feature already: its labels are not shifted again."""
        row = {'input_ids': [5, 6, 7], 'labels': [6, 7, -100], 'id': 'a'}
        assert template.encode(row) == [{**row, 'length': 3}]

    def test_extras_pass_and_inputs_stay(self, template):
        """Other keys come along unchanged, and the row is as it was."""
        row = {
            'messages': CHAT,
            'rewards': 0.5,
            'images': ['x.png'],
            'source': 'web',
            'tools': None,
            'system': 'Be kind.',
        }
        before = copy.deepcopy(row)
        (feature,) = template.encode(row)
        assert row == before
        assert (feature['rewards'], feature['images'], feature['source']) == (0.5, ['x.png'], 'web')
        assert not {'messages', 'tools', 'system', 'text'} & set(feature)

    def test_columns_filled_with_none_are_absent(self, template):
        """What a table fills with None (text, tools, train, tool_calls) changes nothing."""
        filled = [{**m, 'train': None, 'tool_calls': None, 'weight': None, 'reasoning_content': None} for m in CHAT]
        assert template.encode({'messages': filled, 'text': None}) == template.encode({'messages': CHAT})

    def test_messages_as_json(self, template):
        """Messages may come as JSON text."""
        assert template.encode({'messages': json.dumps(CHAT)}) == template.encode({'messages': CHAT})

    def test_text_parts_become_text(self, template):
        """A list of text parts is one text where the chat template knows no parts."""
        parts = [{**m, 'content': [{'type': 'text', 'text': m['content']}]} for m in CHAT]
        assert template.encode({'messages': parts}) == template.encode({'messages': CHAT})

    @pytest.mark.parametrize(
        ('row', 'words'),
        [
            ({'messages': []}, 'empty'),
            ({'messages': 3}, 'list'),
            ({'messages': ['hi']}, 'mapping'),
            ({'messages': [{'content': 'x'}]}, 'role'),
            ({'messages': [{'role': 'user'}]}, 'no content'),
            ({'messages': [{'role': 'user', 'content': 3}]}, 'text or a list'),
            ({'messages': CHAT[:1]}, 'no assistant turn'),
            ({'messages': [{'role': 'user', 'content': 'x', 'train': True}, CHAT[1]]}, 'train=True'),
            ({'messages': [CHAT[0], {**CHAT[1], 'weight': 'high'}]}, 'weight'),
            ({'messages': [{'role': 'system', 'content': 'a'}, *CHAT], 'system': 'b'}, 'differ'),
            ({'text': ''}, 'not empty'),
            ({'text': 7}, 'string'),
            ({'prompt': 'x'}, 'neither'),
            ({'input_ids': []}, 'empty'),
            ({'input_ids': [1, 2], 'labels': [1]}, 'as many'),
        ],
    )
    def test_bad_rows_name_what_is_wrong(self, template, row, words):
        """A row that cannot be encoded is a DataError that says why; in a batch it names the row."""
        with pytest.raises(DataError, match=words):
            template.encode(row)
        with pytest.raises(DataError, match=f'(?s)Row 1: .*{words}'):
            template.batch_encode([{'messages': CHAT}, row])

    def test_a_role_that_is_left_out_is_refused(self, tokenizer):
        """A chat template that renders only what it knows must not lose a message in silence."""
        picky = CHATML.replace(
            "{{ '<|im_start|>'", "{% if message['role'] in ['user', 'assistant'] %}{{ '<|im_start|>'"
        ).replace("{{ '\\n' }}{% endfor %}", "{{ '\\n' }}{% endif %}{% endfor %}")
        template = Template(tokenizer=tokenizer, chat_template=picky)
        assert template.encode({'messages': CHAT})
        with pytest.raises(DataError, match='narrator'):
            template.encode({'messages': [CHAT[0], {'role': 'narrator', 'content': 'meanwhile'}, CHAT[1]]})

    def test_a_template_that_raises_is_a_data_error(self, tokenizer):
        """What a chat template refuses is a DataError with its own words."""
        template = Template(tokenizer=tokenizer, chat_template="{{ raise_exception('roles must alternate') }}")
        with pytest.raises(DataError, match='roles must alternate'):
            template.encode({'messages': CHAT})

    def test_no_chat_template(self):
        """Messages without a chat template: the error says to pass one; text rows still work."""
        template = Template(tokenizer=tiny_tokenizer(chat_template=None))
        assert template.encode({'text': 'hello'})
        with pytest.raises(ConfigError, match='chat_template='):
            template.encode({'messages': CHAT})
        given = Template(tokenizer=tiny_tokenizer(chat_template=None), chat_template=CHATML)
        assert trained(given, given.encode({'messages': CHAT})[0]) == 'A small model.<|im_end|>'


class TestTruncation:
    def test_raise(self, tokenizer):
        """By default a row that is too long is an error with both lengths."""
        with pytest.raises(SampleTooLongError, match='max_length=16'):
            Template(tokenizer=tokenizer, max_length=16).encode({'messages': LONG})

    def test_delete(self, tokenizer):
        """'delete' drops long rows and keeps the others."""
        template = Template(tokenizer=tokenizer, max_length=32, truncation='delete')
        assert template.encode({'messages': LONG}) == []
        assert len(template.batch_encode([{'messages': LONG}, {'messages': CHAT}])) == 1

    def test_left_keeps_the_answer(self, tokenizer):
        """'left' cuts the prompt: the end stays, labels stay aligned."""
        whole = Template(tokenizer=tokenizer).encode({'messages': LONG})[0]
        (cut,) = Template(tokenizer=tokenizer, max_length=24, truncation='left').encode({'messages': LONG})
        assert cut['input_ids'] == whole['input_ids'][-24:]
        assert cut['labels'] == whole['labels'][-24:]

    def test_right_has_no_target_at_the_cut(self, tokenizer):
        """'right' cuts the end, and the last position has no target."""
        row = {'text': 'hello world ' * 10}
        whole = Template(tokenizer=tokenizer).encode(row)[0]
        (cut,) = Template(tokenizer=tokenizer, max_length=7, truncation='right').encode(row)
        assert cut['input_ids'] == whole['input_ids'][:7]
        assert cut['labels'] == [*whole['labels'][:6], IGNORE_INDEX]

    def test_split_keeps_every_token(self, tokenizer):
        """'split' makes windows that together are the row, each with the row's extras."""
        row = {'text': 'hello world ' * 10, 'source': 'a'}
        whole = Template(tokenizer=tokenizer).encode(row)[0]
        parts = Template(tokenizer=tokenizer, max_length=7, truncation='split').encode(row)
        assert [token for part in parts for token in part['input_ids']] == whole['input_ids']
        assert all(part['length'] <= 7 and part['labels'][-1] == IGNORE_INDEX for part in parts)
        assert {part['source'] for part in parts} == {'a'}

    def test_split_drops_windows_without_targets(self, tokenizer):
        """Windows of prompt alone are not kept."""
        parts = Template(tokenizer=tokenizer, max_length=16, truncation='split').encode({'messages': LONG})
        assert parts
        assert all(any(label != IGNORE_INDEX for label in part['labels']) for part in parts)

    def test_only_prompt_left_is_rejected_with_the_reason(self, tokenizer):
        """A prompt longer than max_length leaves only -100: the sample is rejected, not trained to NaN."""
        template = Template(tokenizer=tokenizer, max_length=8, truncation='right')
        with pytest.raises(DataError, match=r'leaves nothing to train on.*max_length=8'):
            template.encode({'messages': LONG})

    @pytest.mark.parametrize('truncation', ['left', 'right', 'split'])
    def test_features_are_cut_along(self, tokenizer, truncation):
        """Rows that are encoded already are truncated with all that is counted per token."""
        row = {
            'input_ids': torch.arange(10),
            'labels': [*range(1, 10), -100],
            'ref_logps': [0.1 * i for i in range(10)],
            'images': ['a'] * 10,
        }
        parts = Template(tokenizer=tokenizer, max_length=4, truncation=truncation).encode(row)
        for part in parts:
            ids = part['input_ids'].tolist()
            assert part['labels'] == [*ids[1:], IGNORE_INDEX]
            assert part['ref_logps'] == [row['ref_logps'][i] for i in ids]
            assert part['images'] == row['images']
            assert part['length'] == len(ids) <= 4


class TestOptions:
    @pytest.mark.parametrize(
        'options',
        [
            {},
            {'tokenizer': 'gpt2'},
            {'model_id': 3},
            {'truncation': 'middle', 'max_length': 8},
            {'truncation': 'left'},
            {'max_length': 1},
            {'max_length': True},
            {'reasoning': 'maybe'},
            {'rounds': 'first'},
            {'rounds': []},
            {'rounds': ['0']},
            {'system': 3},
            {'chat_template': 'no/such/file.jinja'},
        ],
    )
    def test_bad_options(self, tokenizer, options):
        """An option that cannot work is refused when the template is made."""
        base = {} if not options or 'tokenizer' in options or 'model_id' in options else {'tokenizer': tokenizer}
        with pytest.raises(ConfigError):
            Template(**base, **options)

    def test_system(self, tokenizer):
        """The default system prompt is put in only where there is none; a row's own goes before it."""
        template = Template(tokenizer=tokenizer, system='Be brief.')
        text = template.decode(template.encode({'messages': CHAT})[0]['input_ids'])
        assert text.startswith('<|im_start|>system\nBe brief.<|im_end|>\n')
        own = [{'role': 'system', 'content': 'Be long.'}, *CHAT]
        assert 'brief' not in template.decode(template.encode({'messages': own})[0]['input_ids'])
        assert 'Be rude.' in template.decode(template.encode({'messages': CHAT, 'system': 'Be rude.'})[0]['input_ids'])

    def test_train_flags_and_weights(self, tokenizer):
        """`train` overrides `rounds` per message; `weight` fills loss_weights where there are labels, 0 takes out."""
        chat = [CHAT[0], {'role': 'assistant', 'content': 'one', 'train': False}, CHAT[0], {**CHAT[1], 'weight': 0.5}]
        template = Template(tokenizer=tokenizer)
        (feature,) = template.encode({'messages': chat})
        assert trained(template, feature) == 'A small model.<|im_end|>'
        assert feature['loss_weights'] == [0.5 if label != IGNORE_INDEX else 0.0 for label in feature['labels']]
        last = Template(tokenizer=tokenizer, rounds='last')
        (feature,) = last.encode({'messages': [CHAT[0], {**chat[1], 'train': True}, CHAT[0], {**CHAT[1], 'weight': 0}]})
        assert trained(last, feature) == 'one<|im_end|>'

    @pytest.mark.parametrize(
        ('rounds', 'want'), [('all', '012'), ('last', '2'), ([0], '0'), ([-1, 0], '02'), ([1, 9], '1')]
    )
    def test_rounds(self, tokenizer, rounds, want):
        """Rounds are chosen by name or number; numbers that a row does not have are passed over."""
        template = Template(tokenizer=tokenizer, rounds=rounds)
        chat = [m for n in range(3) for m in (CHAT[0], {'role': 'assistant', 'content': f'{n}'})]
        assert trained(template, template.encode({'messages': chat})[0]) == ''.join(f'{n}<|im_end|>' for n in want)

    def test_chat_template_from_a_file(self, tokenizer, tmp_path):
        """chat_template may name a file."""
        (tmp_path / 'chat.jinja').write_text(CHATML_MARKED)
        template = Template(tokenizer=tokenizer, chat_template=str(tmp_path / 'chat.jinja'))
        assert template.tokenizer.chat_template == CHATML_MARKED
        assert tokenizer.chat_template == CHATML

    def test_folder_round_trip(self, tokenizer, template, tmp_path):
        """A saved template is a folder that another one, and plain Transformers, loads; chat template included."""
        template.save_pretrained(tmp_path / 'saved')
        again = Template(str(tmp_path / 'saved'))
        assert again.encode({'messages': CHAT}) == template.encode({'messages': CHAT})
        assert again.pad_token_id == template.pad_token_id

    def test_survives_pickling(self, template):
        """A template can be sent to a worker process, before and after use."""
        want = template.encode({'messages': CHAT})
        assert pickle.loads(pickle.dumps(template)).encode({'messages': CHAT}) == want

    def test_folder_without_a_tokenizer(self, tmp_path):
        """A folder that holds none, and an id that leads nowhere, are errors that name it."""
        with pytest.raises(SourceError, match='No tokenizer'):
            Template(str(tmp_path)).encode({'messages': CHAT})

    def test_arguments_that_a_template_would_quote_twice(self, tokenizer):
        """A template that turns arguments to JSON gets them parsed, whichever way the row gives them."""
        calls = (
            "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + (m['content'] or '') }}"
            '{% for c in m.tool_calls or [] %}{{ c.function.name + (c.function.arguments | tojson) }}{% endfor %}'
            "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
        )
        template = Template(tokenizer=tokenizer, chat_template=calls)
        for arguments in ('{"a": 1}', {'a': 1}):
            turn = {'role': 'assistant', 'content': None, 'tool_calls': [{'name': 'add', 'arguments': arguments}]}
            assert trained(template, template.encode({'messages': [CHAT[0], turn]})[0]) == 'add{"a": 1}<|im_end|>'


class TestPad:
    def test_pad_equal_to_eos_keeps_the_end_label(self, template):
        """With pad == eos the true end token is still a target."""
        (feature,) = template.encode({'messages': CHAT})
        assert template.pad_token_id == template.tokenizer.eos_token_id
        assert feature['labels'][-3] == template.tokenizer.eos_token_id

    @pytest.mark.parametrize(('eos', 'want'), [('<|im_end|>', '<|im_end|>'), (None, '<|reserved_0|>')])
    def test_no_pad_token(self, eos, want):
        """A missing pad token is the end token, else a reserved one; vocabulary and caller's tokenizer stay."""
        tokenizer = tiny_tokenizer(pad=None, eos=eos)
        size = len(tokenizer)
        template = Template(tokenizer=tokenizer)
        assert template.pad_token_id == tokenizer.convert_tokens_to_ids(want)
        assert len(template.tokenizer) == size
        assert tokenizer.pad_token is None

    def test_no_token_can_pad(self):
        """Where no token can pad, the error says so."""
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({'a': 0, 'b': 1})))
        with pytest.raises(ConfigError, match='pad_token'):
            Template(tokenizer=bare).pad_token_id


class TestTokensAndText:
    def test_prompt_is_the_beginning_of_the_row(self, template):
        """encode_prompt gives the tokens in front of the answer."""
        prompt = template.encode_prompt(CHAT[:1])
        (feature,) = template.encode({'messages': CHAT})
        assert feature['input_ids'][: len(prompt)] == prompt
        assert feature['labels'][len(prompt) - 2] == IGNORE_INDEX
        assert feature['labels'][len(prompt) - 1] == feature['input_ids'][len(prompt)]

    def test_decode_takes_lists_tensors_and_labels(self, template):
        """decode reads lists and tensors, leaves -100 out, and hands options to the tokenizer."""
        (feature,) = template.encode({'messages': CHAT})
        assert template.decode(torch.tensor(feature['labels'])) == 'A small model.<|im_end|>'
        assert template.decode(feature['labels'], skip_special_tokens=True) == 'A small model.'
