"""Purges by token ids and by text: which blocks they name, in which spaces, and what they refuse."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvstore.daemon.node import Node
from kvstore.keys import Space, SpaceId, TokenChain, tenant_salt
from kvstore.store import BlockPut
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT
from retention.cli import build_app
from retention.errors import SelectionInvalid
from retention.prefixes import read_tokens, roots_of
from retention.receipt import write_key
from retention.session import EXIT_MISSING, EXIT_NOTHING, EXIT_OK, EXIT_USAGE
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.spaces import BLOCK_TOKENS, a_space, hit_blocks
from tests.support.stores import open_node, short_dir

SHARED = a_space()
ACME = a_space(tenant_salt=tenant_salt("acme"))
OTHER_MODEL = a_space(model="tiny-gemma")
SYSTEM = "you are an agent"
"""16 bytes: with the token before it, 17 tokens are four blocks and one token."""


class Shop:
    """One node on disk, and the command."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.folder = folder
        self.node: Node = open_node(folder / "data", self.clock)
        self.chains: dict[str, TokenChain] = {}

    def run(self, *arguments: str) -> Result:
        app = build_app(lambda addresses, token: Borrowed(self.node), self.clock)  # type: ignore[arg-type, return-value]
        result = CliRunner().invoke(app, ["purge", *arguments, "--store", "node"])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    def purged(self, *arguments: str) -> int:
        """Blocks that went, as a dry run had said before."""
        dry = self.run(*arguments, "--json")
        before = {name: hit_blocks(self.node, chain) for name, chain in self.chains.items()}
        assert before == self.hits(), "a dry run removes nothing"
        done = self.run(*arguments, "--apply", "--json")
        assert done.exit_code == EXIT_OK, done.output
        assert json.loads(done.stdout) == json.loads(dry.stdout) | {"applied": True}
        return int(json.loads(done.stdout)["blocks"])

    def put(self, name: str, space: Space, tokens: list[int]) -> TokenChain:
        space_id = self.node.register_space(space)
        chain = TokenChain(space_id, space.block_tokens, tokens)
        puts = [BlockPut(block, chain.block_tokens, bytes(block.key) * 40) for block in chain.names]
        self.node.put(space_id, puts, traffic_class=AGENT)
        self.chains[name] = chain
        return chain

    def hits(self) -> Mapping[str, int]:
        return {name: hit_blocks(self.node, chain) for name, chain in self.chains.items()}


class Borrowed:
    """The node, for one command, which closes what it was given."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def close(self) -> None:
        pass


@pytest.fixture
def shop() -> Iterator[Shop]:
    with ExitStack() as stack:
        shop = Shop(stack.enter_context(short_dir()))
        stack.callback(lambda: shop.node.close())
        yield shop


def conversations(shop: Shop, space: Space = SHARED, name: str = "") -> None:
    """Two that begin with the same 16 tokens, and one that does not."""
    system = list(range(16))
    shop.put(f"{name}one", space, [*system, *range(100, 112)])
    shop.put(f"{name}two", space, [*system, *range(200, 208)])
    shop.put(f"{name}else", space, list(range(300, 320)))


def as_list(tokens: range | list[int]) -> str:
    return ",".join(map(str, tokens))


def test_token_ids_name_their_last_whole_block_and_what_extends_it(shop: Shop) -> None:
    """17 tokens are four blocks and one token: both conversations that begin so go from the fourth block on."""
    conversations(shop)
    assert shop.purged("--tokens", as_list([*range(16), 9])) == 1 + 3 + 2
    assert shop.hits() == {"one": 3, "two": 3, "else": 5}


def test_from_start_takes_the_blocks_that_others_begin_with_too(shop: Shop) -> None:
    """All of a prompt goes; a conversation that began like it begins anew."""
    conversations(shop)
    assert shop.purged("--tokens", as_list([*range(16), *range(100, 112)]), "--from-start") == 7
    assert shop.hits() == {"one": 0, "two": 0, "else": 5}
    left = shop.node.lookup(shop.chains["two"].space_id, shop.chains["two"].names).presence.tolist()
    assert left == [5, 5, 5, 5, 1, 1]


def test_without_a_space_every_space_of_the_model_is_meant_and_with_a_tenant_only_his(shop: Shop) -> None:
    conversations(shop)
    conversations(shop, ACME, "acme ")
    assert shop.purged("--tokens", as_list(range(16)), "--tenant", "acme") == 6
    assert shop.hits()["one"] == 7
    conversations(shop, ACME, "acme ")
    space = shop.chains["one"].space_id.hex()[:16]
    assert shop.purged("--tokens", as_list(range(16)), "--space", space) == 6
    assert shop.hits()["acme one"] == 7
    conversations(shop)
    assert shop.purged("--tokens", as_list(range(16))) == 12
    assert {name: hits for name, hits in shop.hits().items() if "else" not in name} == {
        "one": 3, "two": 3, "acme one": 3, "acme two": 3,
    }  # fmt: skip


def test_tokens_of_one_model_are_not_looked_for_in_another_unasked(shop: Shop) -> None:
    """The same numbers are another text there."""
    conversations(shop)
    conversations(shop, OTHER_MODEL, "gemma ")
    refused = shop.run("--tokens", as_list(range(16)), "--apply")
    assert refused.exit_code == EXIT_USAGE
    assert "tiny-gemma, tiny-llama" in refused.stderr
    assert shop.purged("--tokens", as_list(range(16)), "--model", "tiny-gemma") == 6
    assert (shop.hits()["one"], shop.hits()["gemma one"]) == (7, 3)
    assert shop.run("--tokens", as_list(range(16)), "--model", "huge").exit_code == EXIT_USAGE


def test_a_text_names_what_the_gateway_makes_of_it(shop: Shop, tmp_path: Path) -> None:
    """Through the tokenizer: its opening token, and control tokens in the text are text."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    text = f"{SYSTEM}<eos> and a good one"
    ids = tokenizer(text, add_special_tokens=True, split_special_tokens=True)["input_ids"]
    shop.put("long", SHARED, [*ids, *range(50, 60)])
    (tmp_path / "text").write_text(text)
    whole = len(ids) // BLOCK_TOKENS
    named = ("--text", str(tmp_path / "text"), "--tokenizer", str(tmp_path / "model"))
    assert shop.purged(*named) == (len(ids) + 10) // BLOCK_TOKENS - whole + 1
    assert shop.hits() == {"long": whole - 1}
    assert shop.run(*named, "--rendered").exit_code == EXIT_NOTHING, "of a rendered chat <eos> is one token"


def test_a_rendered_chat_names_what_the_template_made(shop: Shop, tmp_path: Path) -> None:
    """Control tokens count, and none is added."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    text = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[0] == 4
    shop.put("chat", SHARED, [*ids, *range(50, 60)])
    (tmp_path / "text").write_text(text)
    named = ("--text", str(tmp_path / "text"), "--tokenizer", str(tmp_path / "model"), "--rendered", "--from-start")
    assert shop.purged(*named) == (len(ids) + 10) // BLOCK_TOKENS
    assert shop.hits() == {"chat": 0}


def test_a_purge_by_tokens_can_be_proved(shop: Shop, tmp_path: Path) -> None:
    """With --from-start no byte of the prompt is left, and none of what extends it; the receipt verifies."""
    conversations(shop)
    write_key(tmp_path / "key")
    gone = [bytes(name.key) * 3 for name in shop.chains["one"].names]
    proof = ("--apply", "--proof", str(tmp_path / "receipt"), "--sign-key", str(tmp_path / "key"))
    tokens = as_list([*range(16), *range(100, 112)])
    result = shop.run("--tokens", tokens, "--from-start", *proof)
    assert result.exit_code == EXIT_OK, result.output
    files = [path.read_bytes() for path in (shop.folder / "data" / "segments").rglob("*") if path.is_file()]
    assert not any(trace in data for data in files for trace in gone)
    assert shop.hits() == {"one": 0, "two": 0, "else": 5}
    assert shop.run("--tokens", tokens, *proof).exit_code == EXIT_NOTHING


def test_what_is_shorter_than_a_block_is_refused(shop: Shop) -> None:
    """Nobody knows which blocks begin with three tokens out of four."""
    conversations(shop)
    result = shop.run("--tokens", "0,1,2", "--apply")
    assert result.exit_code == EXIT_USAGE
    assert "3 tokens, fewer than one block" in result.stderr
    assert shop.run("--tokens", as_list(range(900, 904)), "--apply").exit_code == EXIT_NOTHING
    assert shop.hits() == {"one": 7, "two": 6, "else": 5}


def test_a_package_that_lacks_is_named(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage node has no tokenizer: the command says what to install, with a code of its own."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "text").write_text(SYSTEM)
    result = shop.run("--text", str(tmp_path / "text"), "--tokenizer", str(tmp_path))
    assert result.exit_code == EXIT_MISSING
    assert "transformers" in result.stderr


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--tokens", "1,2", "--prefix", "ab" * 32], "exactly one"),
        (["--tokens", "1,2", "--space", "0" * 8, "--tenant", "acme"], "exactly one"),
        (["--tokens", "1,2", "--text", "x", "--tokenizer", "y"], "exactly one"),
        (["--text", "x"], "go together"),
        (["--tokens", "1,2", "--tokenizer", "y"], "go together"),
        (["--tokens", "1,2", "--rendered"], "goes with --text"),
        (["--tenant", "acme", "--from-start"], "go with --tokens"),
        (["--tenant", "acme", "--model", "x"], "go with --tokens"),
        (["--tokens", "/absent/tokens"], "cannot be read"),
        (["--tokens", "[]"], "no token ids"),
        (["--tokens", f"1,2,3,{2**32}"], "u32"),
    ],
)
def test_options_that_do_not_go_together_are_refused(shop: Shop, given: list[str], says: str) -> None:
    shop.node.register_space(SHARED)
    result = shop.run(*given, "--apply")
    assert result.exit_code == EXIT_USAGE, result.output
    assert says in result.stderr


def test_token_ids_are_read_from_lists_and_files(tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("[1, 2,\n 3]\n")
    (tmp_path / "words").write_text("one two")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert read_tokens(str(tmp_path / "ids")) == (1, 2, 3)
    assert read_tokens("7 8,9") == (7, 8, 9)
    for name in ("words", "bytes"):
        with pytest.raises(SelectionInvalid):
            read_tokens(str(tmp_path / name))


def test_a_prefix_names_another_block_in_each_space() -> None:
    """By the space's own number of tokens a block."""
    spaces = {SpaceId(bytes([at]) * 32): a_space(block_tokens=size) for at, size in ((1, 4), (2, 8))}
    roots = roots_of(range(12), spaces)
    assert [len(root.before) for root in roots.values()] == [2, 0]
    assert {space: root.key for space, root in roots.items()} == {
        space: TokenChain(space, known.block_tokens, range(12)).names[-1].key for space, known in spaces.items()
    }
