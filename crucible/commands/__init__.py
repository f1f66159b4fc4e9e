"""The subcommands of ``crucible``, one module each: ``add_parser(subparsers)`` and ``run(args)``.

These modules are all imported to print ``crucible --help``, so nothing heavy is imported at their top.
"""
