"""`optimum-cli export draftc`. Installed as a module of Optimum's namespace `optimum.commands.register`.

optimum-cli imports every module of that namespace whenever it starts, so everything else is imported in `run`. An
`__init__.py` here would hide the plug-ins of other distributions.
"""

from argparse import REMAINDER, ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand

__all__ = ["REGISTER_COMMANDS", "DraftcExportCommand"]


class DraftcExportCommand(BaseOptimumCLICommand):  # type: ignore[misc]  # Optimum is untyped
    """Hands its arguments to `draftc.export.optimum_plugin`."""

    COMMAND = CommandInfo(name="draftc", help="Export a target and its drafter to a draftc bundle of ONNX graphs.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Take every argument as it is, `--help` too: what the options are is known to the compiler alone."""
        parser.prefix_chars = ""
        parser.add_argument("arguments", nargs=REMAINDER)

    def run(self) -> None:
        """Compile; raises SystemExit with the exit code of `draftc compile`."""
        from draftc.export.optimum_plugin import export

        export(self.args.arguments)


REGISTER_COMMANDS = [(DraftcExportCommand, ExportCommand)]
