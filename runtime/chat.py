"""`draftc chat`: one conversation on a terminal, or scripted through standard input.

The whole conversation is the prompt of every turn. The session keeps the KV entries of what it has seen, so a turn
prefills only what is new.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable

from draftc.runtime.console import AnswerWriter, follow, note, stats_line
from draftc.runtime.errors import CapacityError, UsageError
from draftc.runtime.request import Generation, Options
from draftc.runtime.session import Session

__all__ = ["Chat"]

ANSWER_ROOM = 256  # tokens kept free for an answer whose length nobody limited, in a long conversation
HELP = """\
/help         this list
/reset        forget the conversation
/system TEXT  set the system prompt; without TEXT remove it
/undo         take back the last message and its answer
/stats        figures of the last answer
/exit         leave, as does Ctrl-D
A line that ends in \\ goes on in the next one; //text sends "/text". Ctrl-C stops an answer; what was said stays."""


class Chat:
    """A conversation with `session`, every answer made with `options`.

    `history` alternates between user and assistant. An answer that was stopped stays in it as far as it got: it is what
    the user has read. Raises UsageError where the checkpoint has no chat template.
    """

    def __init__(
        self,
        session: Session,
        options: Options,
        system: str | None = None,
        show_drafts: bool = False,
        show_stats: bool = False,
    ) -> None:
        if not session.tokenizer.has_chat_template:
            raise UsageError("this checkpoint has no chat template: `draftc run` continues plain text")
        self.session = session
        self.options = options
        self.system = system
        self.show_drafts = show_drafts
        self.show_stats = show_stats
        self.history: list[dict[str, str]] = []
        self.last: Generation | None = None
        self.interactive = sys.stdin.isatty()

    def run(self) -> None:
        """Read messages and commands until the input ends or /exit."""
        if self.interactive:
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")  # arrow keys and recall in input()
            note(f"{self.session.manifest.name}: /help lists the commands, Ctrl-D ends")
        while True:
            try:
                line = self._read_message()
            except EOFError:
                if self.interactive:
                    note("")
                return
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                note("\nCtrl-D or /exit ends the chat")
                continue
            if line.strip() == "/exit":
                return
            if line.startswith("/") and not line.startswith("//"):
                self._command(*line[1:].split(maxsplit=1))
            elif line.strip():
                self._turn(line.removeprefix("/"))

    def _command(self, name: str = "", text: str = "") -> None:
        commands: dict[str, Callable[[], None]] = {
            "help": lambda: note(HELP),
            "reset": self._reset,
            "system": lambda: self._set_system(text),
            "undo": self._undo,
            "stats": self._stats,
        }
        if name in commands:
            commands[name]()
        else:
            note(f"unknown command /{name}: /help lists them")

    def _reset(self) -> None:
        self.history.clear()
        self.last = None
        self.session.reset()
        note("the conversation is forgotten")

    def _set_system(self, text: str) -> None:
        self.system = text or None
        note("system prompt set" if text else "system prompt removed")

    def _undo(self) -> None:
        note("the last message and its answer are taken back" if self.history else "nothing to take back")
        del self.history[-2:]

    def _stats(self) -> None:
        note(stats_line(self.last) if self.last else "no answer yet")

    def _turn(self, text: str) -> None:
        """One message and its answer. A message that gets no answer is taken back."""
        history = [*self.history, {"role": "user", "content": text}]
        try:
            dropped, prompt = self._fit(history)
            with self.session.stream(prompt, **self.options) as stream:
                if dropped:
                    turns = "turn is" if dropped == 1 else f"{dropped} turns are"
                    note(f"(the oldest {turns} forgotten: the bundle holds {self.session.manifest.max_length} tokens)")
                answer = follow(stream, AnswerWriter(self.show_drafts))
        except (CapacityError, UsageError) as error:
            if not self.interactive:
                raise
            note(f"draftc: {' '.join(str(error).split())}")
            return
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            note("\nstopped: the message is taken back")
            return
        self.history = [*history[2 * dropped :], {"role": "assistant", "content": answer.text}]
        self.last = answer
        if self.show_stats:
            note(stats_line(answer))
        if answer.finish_reason == "cancelled" and not self.interactive:
            raise KeyboardInterrupt  # a script is stopped, not its current answer

    def _fit(self, history: list[dict[str, str]]) -> tuple[int, list[int]]:
        """(turns dropped from the front, token ids of the rest) so that the answer has room, as far as possible."""
        max_length = self.session.manifest.max_length
        room = self.options.get("max_new_tokens") or min(ANSWER_ROOM, max_length // 4)
        system = [{"role": "system", "content": self.system}] if self.system else []
        for dropped in range((len(history) + 1) // 2):
            prompt = self.session.encode([*system, *history[2 * dropped :]])
            if len(prompt) + room <= max_length:
                break
        return dropped, prompt

    def _read_message(self) -> str:
        lines = [self._read_line(">>> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            with contextlib.suppress(EOFError):
                lines.append(self._read_line("... "))
        return "\n".join(lines)

    def _read_line(self, prompt: str) -> str:
        if self.interactive:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")
