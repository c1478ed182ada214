"""Stubs of programs in the pages of docs/ that tests cannot run, with the reason for each stub.

`put_into` writes an executable for each name into a folder for the PATH. A stub checks its
arguments as far as this machine allows, and fails if they are wrong. The executables call this
file:

    python tests/support/program_stubs.py PROGRAM ARGUMENT …
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import yaml

ROOT = Path(__file__).parents[2]
ROOT_VARIABLE = "PROGRAM_STUBS_ROOT"  # environment variable: the folder that is `/` for a page

# command -> why it is not run; the replacement
REASONS = {
    "mlxpool bench": "measures for minutes: its own parser reads the arguments",
    "python examples/train_demo_chat.py": "trains for most of an hour: its own parser reads these",
    "python examples/train_demo_embedding.py": "trains for minutes: its own parser reads these",
    "python examples/train_demo_head.py": "trains on a GPU: its own parser reads the arguments",
    "python examples/train_demo_model.py": "trains on a GPU: its own parser reads the arguments",
    "python -m pytest": "the suite runs these itself: they are collected",
    "python3 -m venv": "takes long: a folder with this environment's programs is made",
    "pip": "needs a registry: what is named is looked up in pyproject.toml",
    "make": "would install an environment: `make -n`; what `make demo` runs is run",
    "docker": "needs a daemon: files, targets and services are looked up",
    "kubectl": "needs a cluster: --dry-run=client, kustomize; else the files are looked up",
    "launchctl": "is a Mac's: the plist is read",
    "systemctl": "needs systemd: `systemd-analyze verify`, then the unit's own command is run",
    "systemd-sysusers": "makes users: a dry run",
    "sudo": "needs root: the user has to be the one of sysusers.conf, the command is run as we are",
    "install": "-o and -g need root: the names are looked up, the rest is done",
}


def fail(words: str) -> NoReturn:
    sys.exit(f"stub: {words}")


def need(truth: object, words: str) -> None:
    if not truth:
        fail(words)


def only(words: Sequence[str], *known: str) -> None:
    """Fails if a flag is not in `known`."""
    for word in words:
        need(not word.startswith("-") or word.partition("=")[0] in known, f"no flag {word}")


def placed(path: str) -> Path:
    """Returns a path; maps an absolute path outside the page's root folder into this folder."""
    root = os.environ[ROOT_VARIABLE]
    return Path(path) if not path.startswith("/") or path.startswith(root) else Path(root + path)


def program_path(name: str) -> str:
    """Returns the path of the real program; "" if it is not installed."""
    return shutil.which(name, path=os.defpath) or ""


# ---- Python --------------------------------------------------------------------------------------


class ArgumentsParsed(Exception):
    """Raised when the parser of a program has accepted its arguments."""


def parse_only(program: str, words: Sequence[str]) -> None:
    """Runs a Python program only until it has parsed its command line."""

    def parsed(
        self: argparse.ArgumentParser, args: object = None, namespace: object = None
    ) -> None:
        parse_args(self, words)
        raise ArgumentsParsed

    parse_args = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = parsed  # type: ignore[assignment, method-assign]
    sys.argv = [program, *words]
    sys.path.insert(0, str(Path(program).resolve().parent))
    try:
        runpy.run_path(program, run_name="__main__")
    except ArgumentsParsed:
        return
    fail(f"{program} read no command line")


def python(words: Sequence[str]) -> None:
    if words[:2] == ["-m", "venv"]:
        make_environment(Path(words[2]))
    elif words[:2] == ["-m", "pytest"]:
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *words[2:]]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        need(done.returncode == 0, done.stdout)
    else:
        parse_only(words[0], words[1:])


def make_environment(folder: Path) -> None:
    """Makes `bin/pip` and `bin/mlxpool`, the parts of a virtual environment that a page uses."""
    (folder / "bin").mkdir(parents=True)
    for name in ("pip", "mlxpool"):
        (folder / "bin" / name).symlink_to(str(shutil.which(name)))


def mlxpool(words: Sequence[str]) -> None:
    from support.command_lines import parsed

    parsed(words)


def pip(words: Sequence[str]) -> None:
    need(words[0] == "install", f"pip {words[0]}")
    rest = list(words[1:])
    if "-c" in rest:
        where = rest.index("-c")
        need((ROOT / rest[where + 1]).is_file(), f"no constraints {rest[where + 1]}")
        del rest[where : where + 2]
    only(rest)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]
    for word in rest:
        if word == "./client":
            continue
        match = re.fullmatch(r"(?:\.|mlxpool)(?:\[([\w,]+)\])?", word)
        need(match and set((match[1] or "").split(",")) <= {*extras, ""}, f"pip install {word}")


def make(words: Sequence[str]) -> None:
    done = subprocess.run(
        [program_path("make"), "-n", "-C", str(ROOT), *words], capture_output=True, text=True
    )
    need(done.returncode == 0, done.stderr)
    if list(words) == ["demo"]:
        subprocess.run([sys.executable, "examples/demo.py"], cwd=ROOT, check=True)


# ---- containers ----------------------------------------------------------------------------------


def docker(words: Sequence[str]) -> None:
    options = argparse.ArgumentParser(allow_abbrev=False)
    commands = options.add_subparsers(required=True, dest="verb")
    build = commands.add_parser("build", allow_abbrev=False)
    build.add_argument("-f", type=Path, required=True)
    build.add_argument("--target", required=True)
    build.add_argument("-t", required=True)
    build.add_argument("context", type=Path)
    compose = commands.add_parser("compose", allow_abbrev=False)
    compose.add_argument("-f", type=Path, required=True)
    verbs = compose.add_subparsers(required=True, dest="what")
    for name, flags in (("up", ["--build", "--detach"]), ("exec", []), ("run", ["--rm"])):
        verb = verbs.add_parser(name, allow_abbrev=False)
        for flag in flags:
            verb.add_argument(flag, action="store_true")
        if name == "run":
            verb.add_argument("--entrypoint")
        if name != "up":
            verb.add_argument("service")
            verb.add_argument("words", nargs="+")
    options_ = options.parse_args(words)
    if options_.verb == "build":
        need(options_.context.is_dir(), f"no folder {options_.context}")
        need(options_.target in targets(options_.f), f"no target {options_.target} in {options_.f}")
        return
    services = yaml.safe_load(options_.f.read_text("utf-8"))["services"]
    need(options_.what == "up" or options_.service in services, f"no such service: {words}")
    for name, service in services.items():
        about = service.get("build")
        if about is not None:
            file = options_.f.parent / about["context"] / about["dockerfile"]
            need(about["target"] in targets(file), f"{name}: no target {about['target']} in {file}")


def targets(dockerfile: Path) -> set[str]:
    return set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile.read_text("utf-8"), re.M))


def kubectl(words: Sequence[str]) -> None:
    for word in words:
        if word.startswith("--from-file="):
            need(Path(word.partition("=")[2]).is_file(), f"no file of {word}")
    if "apply" in words:
        need(words[0] == "apply" and words[1] == "-k", f"kubectl {shlex.join(words)}")
        need((Path(words[2]) / "kustomization.yaml").is_file(), f"no kustomization in {words[2]}")
        command = ["kustomize", words[2]]
    else:
        need("create" in words, f"kubectl {shlex.join(words)}")
        command = [*words, "--dry-run=client", "-o", "yaml"]
    program = program_path("kubectl")
    if program:
        done = subprocess.run([program, *command], capture_output=True, text=True)
        need(done.returncode == 0, done.stderr)


# ---- services ------------------------------------------------------------------------------------


def user_is_known(name: str) -> None:
    users = re.findall(r"^u (\S+) ", (placed("/etc/sysusers.d") / "mlxpool.conf").read_text(), re.M)
    need(name in users, f"no user {name}; sysusers.conf makes {users}")


def sudo(words: Sequence[str]) -> None:
    need(words[0] == "-u", f"sudo {shlex.join(words)}")
    user_is_known(words[1])
    os.execvp(words[2], list(words[2:]))


def install(words: Sequence[str]) -> None:
    rest = list(words)
    for flag in ("-o", "-g"):
        if flag in rest:
            where = rest.index(flag)
            user_is_known(rest[where + 1])
            del rest[where : where + 2]
    parent = Path(rest[-1].rstrip("/") if "-d" in rest else rest[-1])
    (parent if rest[-1].endswith("/") else parent.parent).mkdir(parents=True, exist_ok=True)
    os.execv(program_path("install"), ["install", *rest])


def systemd_sysusers(words: Sequence[str]) -> None:
    only(words)
    program, text = program_path("systemd-sysusers"), placed("/etc/sysusers.d/mlxpool.conf")
    if program:
        done = subprocess.run([program, "--dry-run", str(text)], capture_output=True, text=True)
        need(done.returncode == 0, done.stderr)
    need(re.fullmatch(r"(#.*\n)*u \S+ - \".*\" /\S+\n", text.read_text()), f"{text} is odd")


def systemctl(words: Sequence[str]) -> None:
    if list(words) == ["daemon-reload"]:
        return
    need(words[0] == "restart" or words[:2] == ["enable", "--now"], f"systemctl {words}")
    name, _, instance = words[-1].partition("@")
    unit = placed("/etc/systemd/system") / (f"{name}@.service" if instance else f"{name}.service")
    need(unit.is_file(), f"no unit {unit}")
    text = unit.read_text("utf-8")
    program = program_path("systemd-analyze")
    if program:
        copy = Path(os.environ[ROOT_VARIABLE]) / f"{name}{'@' * bool(instance)}{instance}.service"
        copy.write_text(text.replace("/opt/mlxpool/current/bin/mlxpool", "/bin/true"))
        done = subprocess.run([program, "verify", "--man=no", copy], capture_output=True, text=True)
        need((done.returncode, done.stderr) == (0, ""), done.stderr)
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.M)
    for key, value in service_variables(text, files=not instance).items():
        line = line.replace(f"${{{key}}}", value)
        os.environ[key] = str(placed(value)) if value.startswith("/run/") else value
    if instance:  # the broker is on another machine, so only the arguments are checked
        mlxpool(shlex.split(re.sub(r"\$\{(\w+)\}", r"of-\1", line).replace("%I", instance))[1:])
    else:
        start(
            name, re.sub(r"(?<=[ =])/(?=\w)", f"{os.environ[ROOT_VARIABLE]}/", f" {line}").split()
        )


def service_variables(text: str, *, files: bool) -> dict[str, str]:
    """Returns the variables in a systemd unit; with `files` also the variables in its files."""
    variables = re.findall(r"^Environment=(MLXPOOL\w+)=(.*)$", text, re.M)
    for path in re.findall(r"^EnvironmentFile=(.*)$", text, re.M) if files else ():
        variables += re.findall(r"^(\w+)=(.*)$", placed(path).read_text("utf-8"), re.M)
    return {**dict(variables), "HTTP_PORT": "0"}  # the usual port may be in use here


def start(name: str, command: Sequence[str]) -> None:
    """Starts a service, or restarts it, and waits until it answers.

    systemd waits in the same way for a service with Type=notify.
    """
    placed("/run/mlxpool").mkdir(mode=0o700, parents=True, exist_ok=True)
    pid_file = placed(f"/run/{name}.pid")
    if pid_file.exists():
        pid = int(pid_file.read_text())
        os.kill(pid, 15)
        while is_running(pid):
            time.sleep(0.02)
    with placed(f"/run/{name}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    pid_file.write_text(f"{process.pid}\n")  # the line end separates pids in a `cat` of files
    command_ = [command[0], "--run-dir", str(placed("/run/mlxpool")), "ps"]
    while subprocess.run(command_, capture_output=True).returncode:
        need(process.poll() is None, placed(f"/run/{name}.log").read_text())


def is_running(pid: int) -> bool:
    """Returns whether a process runs; a zombie does not run."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def launchctl(words: Sequence[str]) -> None:
    import plistlib

    need(words[0] == "bootstrap" and words[1].startswith("gui/"), f"launchctl {words}")
    plist = plistlib.loads(Path(words[2]).read_bytes())
    need("@HOME@" not in str(plist), f"{words[2]} names no home")
    program, *arguments = plist["ProgramArguments"]
    need(Path(program).exists(), f"no program {program}")
    mlxpool(arguments)


# ---- the folder ----------------------------------------------------------------------------------

STUBS: dict[str, Callable[[Sequence[str]], None]] = {
    "docker": docker,
    "install": install,
    "kubectl": kubectl,
    "launchctl": launchctl,
    "make": make,
    "mlxpool": mlxpool,
    "pip": pip,
    "python": python,
    "python3": python,
    "sudo": sudo,
    "systemctl": systemctl,
    "systemd-sysusers": systemd_sysusers,
}
# Shell patterns of arguments for which the stub runs; for other arguments the real program runs.
STUBBED_ARGUMENTS = {
    "mlxpool": '*" bench "*',
    "python": '" examples/train_demo_"*|" -m pytest "*',
    "python3": '" -m venv "*',
}


def put_into(folder: Path) -> None:
    """Writes the executables into a new folder for the PATH."""
    folder.mkdir()
    programs = Path(sys.executable).parent
    for name in STUBS:
        call = f'exec {sys.executable} {__file__} {name} "$@"'
        if name in STUBBED_ARGUMENTS:
            program = programs / name.removesuffix("3") if name != "mlxpool" else programs / name
            call = f'case " $* " in {STUBBED_ARGUMENTS[name]}) {call};; esac\nexec {program} "$@"'
        path = folder / name
        path.write_text(f"#!/bin/bash\n{call}\n")
        path.chmod(0o755)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))  # for `support`
    STUBS[sys.argv[1]](sys.argv[2:])
