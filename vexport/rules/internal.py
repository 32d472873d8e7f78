"""Rules of vexport itself."""

from vexport.rules.book import Rule

EXCEPTION = Rule("internal/exception", got="{error}", do="rerun with --debug and report it")
