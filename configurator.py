"""A script's settings are its own top-level assignments; config files and `--key=value` override them.

    lr = 1e-4  # peak learning rate
    config = configure(globals())

    python script.py config/a.py config/b.py --lr=3e-4 --lr 3e-4

Config files hold assignments of literals and are parsed, never executed. The command line wins over every file, and a
later file over an earlier one. A file may begin with base = "a.py,b.py": files relative to it that are read before it.
A key that the script does not have, or a value of another type, is an error.
"""

import ast
import difflib
import functools
import importlib.metadata
import inspect
import json
import operator
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

from guard import UserError, hold_folder, show_error, speak_utf8, write_atomic

TYPES = (bool, int, float, str, tuple)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
             ast.FloorDiv: operator.floordiv}
COMPARE = {"at_least": operator.ge, "more_than": operator.gt, "at_most": operator.le, "below": operator.lt}
PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "numpy", "h5py")
defaults = {}  # the script's settings before files and flags
given = set()  # names of those that files and flags have set


def configure(namespace, also="", others="", recorded=None):
    """Apply sys.argv to the settings in `namespace` (a script's globals()) and return them all as a dict.

    also: a setting. Config files are shared with the scripts beside this one that have it, copies among them: what
    only those know is skipped here. others: the setting that arguments which are no config files are the value of.
    recorded: config -> {key: value} for what isn't given. Fills `defaults` and `given`.
    Raises UserError for an unknown key, a wrong type or an unreadable file, and installs the hook that shows it.
    """
    sys.excepthook = show_error
    speak_utf8()
    script = Path(namespace["__file__"])
    comments = _settings(script)
    config = {key: namespace[key] for key in comments if type(namespace.get(key)) in TYPES}
    config = {key: _check(key, value, value, "") for key, value in config.items()}
    siblings = functools.cache(lambda: _siblings(script, also))  # nothing is read while all keys are known here
    defaults.clear()
    defaults.update(config)
    given.clear()
    is_rank_0 = os.environ.get("RANK", "0") == "0"
    if {"-h", "--help"} & set(sys.argv[1:]):
        if is_rank_0:
            _print_help(namespace.get("__doc__"), config, comments)
        sys.exit(0)
    try:
        files, flags = _split(sys.argv[1:], others)
        for where, key, value in [*(line for file in files for line in _assignments(file)), *flags]:
            if key in config:
                config[key] = _check(key, _value(where, key, value, config[key]), config[key], where)
                given.add(key)
            else:
                _refuse_unless_shared(where, key, config, script, siblings())
        for key, value in recorded(config).items() if recorded else ():
            if key in config and key not in given:
                config[key] = _check(key, value, config[key], "")
    except UserError:
        if is_rank_0:
            raise
        time.sleep(10)  # every rank has this error; torchrun ends them all when one exits, so let rank 0 speak first
        sys.exit(1)
    namespace.update(config)
    return config


def check_values(config, one_of, mistakes=(), **bounds):
    """One UserError for all settings that are out of bounds, and the caller's own mistakes.

    bounds: at_least, more_than, at_most, below = {name: number}; one_of: {name: ("a", "b")}. A setting that config
    lacks, as a copy of the script does without it, isn't looked at.
    """
    wrong = [f"{name}={config[name]}: want {words.replace('_', ' ')} {limit}"
             for words, limits in bounds.items() for name, limit in limits.items()
             if name in config and not COMPARE[words](config[name], limit)]
    wrong += [f"{name}={config[name]}: want {', '.join(choices[:-1])} or {choices[-1]}"
              for name, choices in one_of.items() if name in config and config[name] not in choices]
    wrong = [*wrong, *mistakes]
    for name in [name for name in defaults.keys() - given if config.get(name) == defaults[name]]:
        start = f"{name}={config[name]}:"
        wrong = [line.replace(start, f"{start[:-1]} (the default, --{name}= changes it):") if line.startswith(start)
                 else line for line in wrong]
    if wrong:
        raise UserError("; ".join(wrong))


def save_config(out_dir, config):
    """Write out_dir/config.json: settings, package versions, python, git commit ("-dirty" if edited, null if none)."""
    record = {
        "settings": config,
        "versions": {package.name: package.version for package in importlib.metadata.distributions()
                     if package.name in PACKAGES},
        "python": platform.python_version(),
        "commit": git_commit(),
    }
    hold_folder(out_dir)
    write_atomic(Path(out_dir, "config.json"), (json.dumps(record, indent=2) + "\n").encode())


def _settings(script):
    """{name: trailing comment} of the top-level assignments above a script's call of configure(); {} without one."""
    source = script.read_text(encoding="utf-8")
    lines = source.splitlines()
    comments = {}
    for node in ast.parse(source).body:
        calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
        if any(getattr(func, "id", getattr(func, "attr", "")) == "configure" for func in calls):
            return comments
        if isinstance(node, ast.Assign):
            tail = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()  # ast counts columns in bytes
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            comments.update({name: tail.strip().lstrip("# ") for name in names if not name.startswith("_")})
    return {}


def _siblings(script, also):
    """{file name: its settings} of the other scripts in the folder that have the setting `also`; none is executed."""
    found = {}
    for path in sorted(script.parent.glob("*.py")) if also else []:
        try:
            if path.name != script.name and also in (settings := _settings(path)):
                found[path.name] = settings
        except (OSError, SyntaxError, ValueError):
            continue  # a file that is being written, or no text
    return found


def _split(args, others):
    """Command line -> config files, [("--", key, text)]; what is neither, comma-joined, is the setting `others`."""
    files, flags, values, args = [], [], [], list(args)
    while args:
        arg = args.pop(0)
        key, has_value, text = arg.removeprefix("--").partition("=")
        if not arg.startswith("--"):
            if arg.endswith(".py"):
                files.append(arg)
            elif others and not arg.startswith("-"):
                values.append(arg)
            else:
                raise UserError(f"{arg}: want a config file (config/NAME.py) or --key=value")
            continue
        if not has_value:
            if not args or args[0].startswith("--"):
                raise UserError(f"{arg}: got no value, want {arg}=VALUE (True or False for a switch)")
            text = args.pop(0)
        flags.append(("--", key.replace("-", "_"), text))
    return files, flags + [("--", others, ",".join(values))] * bool(values)


def _assignments(file, above=()):
    """[(where, key, syntax tree of the value)] of a config file, those of the files it names as its base first.

    above: the files that led here by naming each other as their base.
    """
    try:
        body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    except OSError as error:
        raise UserError(f"{file}: cannot read the config file ({error.strerror})") from error
    except SyntaxError as error:
        raise UserError(f"{file}:{error.lineno}: {error.msg}, want lines like key = value") from error
    except ValueError as error:  # not UTF-8, or a NUL byte
        raise UserError(f"{file}: not a text file ({error})") from error
    found, above = [], (*above, Path(file).resolve())
    for node in body:
        where = f"{file}:{node.lineno}: "
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue  # a docstring
        if not isinstance(node, ast.Assign) or not all(isinstance(target, ast.Name) for target in node.targets):
            raise UserError(f"{where}got {ast.unparse(node).splitlines()[0]!r}, want only lines like key = value")
        keys = [target.id for target in node.targets]
        if "base" not in keys:
            found += [(where, key, node.value) for key in keys]
            continue
        names = getattr(node.value, "value", None)
        if found or not isinstance(names, str):
            raise UserError(f'{where}got {ast.unparse(node)!r}, want base = "NAME.py" above all settings')
        for path in [Path(file).parent / os.path.expanduser(name.strip()) for name in names.split(",")]:
            if path.resolve() in above:
                raise UserError(f"{where}base={names}: {path} is based on this file, want one that isn't")
            if not path.is_file():
                raise UserError(f"{where}base={names}: {path} is not there, want a path relative to this file")
            found += _assignments(path, above)
    return found


def _refuse_unless_shared(where, key, config, script, siblings):
    """UserError for a key that is no setting of this script, unless a file sets a sibling's."""
    owners = [name for name, settings in siblings.items() if key in settings]
    if where != "--" and owners:
        return
    theirs = [] if where == "--" else [name for settings in siblings.values() for name in settings]
    hint = f" but of {owners[0]}: put it in a config file" if owners else _nearest(key, [*config, *theirs])
    raise UserError(f"{where}{key} is not a setting of {script.name}{hint}")


def _value(where, key, value, default):
    """Of a syntax tree in a file, a literal; of a flag's text, a literal or that text."""
    if isinstance(value, ast.AST):
        try:
            return _literal(value)
        except (ValueError, TypeError, ArithmeticError) as error:
            raise UserError(f"{where}{key}={ast.unparse(value)}: want a plain literal value") from error
    if isinstance(default, str):
        return value
    try:
        text = value.strip().capitalize() if isinstance(default, bool) else value.strip()
        return _literal(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, ArithmeticError):
        return value


def _literal(node):
    """Value of a syntax tree of literals and of sums and products of numbers."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_literal(node.left), _literal(node.right))
    if isinstance(node, ast.Tuple):
        return tuple(_literal(element) for element in node.elts)
    return ast.literal_eval(node)


def _check(key, value, default, where):
    """The value if it has the default's type (an int may stand for a float; a tuple's items follow the default's)."""
    want = type(default)
    if want is float and type(value) is int:
        return float(value)
    if type(value) is not want:
        hint = " (True or False)" if want is bool else f" like {default!r}"
        raise UserError(f"{where}{key}={value!r}: got {type(value).__name__}, want {want.__name__}{hint}")
    if want is str:
        if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
            raise UserError(f"{where}{key}={value!r}: got what is no letter in UTF-8, want text")
        return re.sub(r"(^|,\s*)(~[^/,\s]*)(?=/|$)", lambda match: match[1] + os.path.expanduser(match[2]), value)
    if want is tuple and len({type(item) for item in default}) == 1:
        return tuple(_check(f"{key}[{index}]", item, default[0], where) for index, item in enumerate(value))
    return value


def _nearest(key, names):
    return "".join(f"; the nearest is {name}" for name in difflib.get_close_matches(key, names, n=1, cutoff=0))


def _print_help(doc, config, comments):
    flags = {key: f"--{key}={value!r}" for key, value in config.items()}
    width = min(48, max(map(len, flags.values()), default=0))
    print(inspect.cleandoc(doc or ""), "", "settings:", sep="\n")
    for key, flag in flags.items():
        print(f"  {flag:{width}}  {comments[key]}".rstrip())


def git_commit():
    """Of this code: "-dirty" if edited, None if it is no repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, encoding="utf-8", timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip() if run.returncode == 0 else None
