#!/usr/bin/env bash
# Install bitnest-edge on a Jetson (JetPack 6 or 7) beside NVIDIA's torch, which pip never replaces.
#
#   jetson/install.sh                              torch of the system's Python, or asks for a wheel
#   jetson/install.sh --torch WHEEL|URL            the wheel that NVIDIA names for your JetPack
#   jetson/install.sh --torch none                 without torch: chat and serve on the board's CPU
#   sudo jetson/install.sh --service MODEL         also a systemd unit that serves MODEL
#
#   --venv DIR      where to   [default: /opt/bitnest-edge as root, else ~/bitnest-edge]
#   --extras LIST   [default: convert,serve,chat with torch, else serve,chat; those that there are]
#   --jetpack 6|7   where the release cannot be read, as in a container
#   --force         on something that is no Jetson, or with another Python
#   --dry-run       say what would be done
#   --no-doctor     do not look at the board at the end, as while an image is built
#   --root DIR      stands in for / (tests)
#
# Exit: 0 ok, 2 usage, 4 something is missing here, 1 a step failed.
#
# Which torch: https://docs.nvidia.com/deeplearning/frameworks/install-pytorch-jetson-platform/
# No address or version of a wheel is written down here: they change with each JetPack.
set -euo pipefail

PAGE=https://docs.nvidia.com/deeplearning/frameworks/install-pytorch-jetson-platform/
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root='' venv='' torch='' extras='' jetpack='' model='' force='' dry='' doctor=1
python=${PYTHON:-python3}

say() { printf '%s\n' "$*" >&2; }
fail() { # CODE MESSAGE [HINT]
  say "error: $2"
  if [ -n "${3-}" ]; then say "hint: $3"; fi
  exit "$1"
}
run() {
  if [ -n "$dry" ]; then
    printf 'would run: '
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}

parse() {
  while [ $# -gt 0 ]; do
    case "$1" in
      --torch | --venv | --extras | --jetpack | --service | --root)
        [ $# -ge 2 ] || fail 2 "$1 needs a value"
        case "$1" in
          --torch) torch=$2 ;;
          --venv) venv=$2 ;;
          --extras) extras=$2 ;;
          --jetpack) jetpack=$2 ;;
          --service) model=$2 ;;
          --root) root=${2%/} ;;
        esac
        shift
        ;;
      --force) force=1 ;;
      --dry-run) dry=1 ;;
      --no-doctor) doctor='' ;;
      -h | --help) sed -n '2,/^set -euo/{/^set/!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
      *) fail 2 "unknown option $1" "see $0 --help" ;;
    esac
    shift
  done
}

# What shebangs, unit files and settings take as it is.
check_path() { # OPTION PATH
  case "$2" in *[[:space:]\|\&\\%\$\"\']*)
    fail 2 "$1: expected a path without spaces, quotes and | & % \$ \\, got $2" ;;
  esac
}

# ---- the board

# L4T r36 is JetPack 6; r38 and r39 are JetPack 7 (its first line: "# R36 (release), REVISION: 4.3")
find_jetpack() {
  local release="$root/etc/nv_tegra_release" major
  if [ -n "$jetpack" ]; then
    case "$jetpack" in 6 | 7) return ;; *) fail 2 "--jetpack: expected 6 or 7, got $jetpack" ;; esac
  fi
  if [ ! -r "$release" ]; then
    [ -n "$force" ] || fail 4 "this is no Jetson: there is no $release" \
      "on a PC: pip install '.[convert]'; in a container: --jetpack 6 or 7"
    jetpack=6
    say "no Jetson: treated as JetPack $jetpack"
    return
  fi
  major=$(sed -n '1s/^# R\([0-9]*\) (release).*/\1/p' "$release")
  case "$major" in
    36) jetpack=6 ;;
    38 | 39) jetpack=7 ;;
    32 | 34 | 35) fail 4 "L4T r$major is older than JetPack 6: its Python is too old (3.10 is needed)" \
      "flash JetPack 6 or 7" ;;
    *) fail 4 "L4T release ${major:-unknown} in $release is not known" "say which it is like: --jetpack 7" ;;
  esac
  say "L4T r$major: JetPack $jetpack"
}

check_machine() {
  local machine want have
  machine=$(uname -m)
  if [ "$machine" != aarch64 ] && [ -z "$force" ]; then
    fail 4 "expected an aarch64 machine, got $machine" "--force installs all the same"
  fi
  command -v "$python" >/dev/null || fail 4 "no $python" "sudo apt-get install python3 python3-venv"
  case "$jetpack" in 6) want=3.10 ;; 7) want=3.12 ;; esac
  have=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  if [ "$have" != "$want" ] && [ -z "$force" ]; then
    fail 4 "JetPack $jetpack has Python $want, and wheels of torch are made for it; $python is $have" \
      "PYTHON=python$want $0 …, or --force"
  fi
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail 4 "$python cannot make virtual environments" "sudo apt-get install python3-venv"
  command -v c++ >/dev/null ||
    say "no C++ compiler: the kernels of the board's CPU are left out (sudo apt-get install g++)"
}

# ---- torch

# Prints "VERSION CUDA" of the torch that a Python imports, nothing if there is none; CUDA is none in
# builds for the CPU, which is what PyPI has for a Jetson's GPU.
torch_of() {
  "$1" -c 'import torch; print(torch.__version__, torch.version.cuda or "none")' 2>/dev/null || true
}

check_torch() {
  case "$torch" in
    none | http://* | https://*) ;;
    *.whl) [ -f "$torch" ] || fail 2 "no such wheel: $torch" ;;
    *) fail 2 "expected a wheel of torch, its URL or none, got '$torch'" "$PAGE" ;;
  esac
}

choose_torch() {
  local found
  if [ -n "$torch" ]; then check_torch; return; fi
  found=$(torch_of "$python")
  if [ -n "$found" ] && [ "${found#* }" != none ]; then
    torch=system
    say "torch ${found% *} for CUDA ${found#* } of $python is used"
    return
  fi
  if [ -n "$found" ]; then say "torch ${found% *} of $python is not built for a GPU: not used"; fi
  if [ -t 0 ] && [ -z "$dry" ]; then
    say "No torch for this GPU was found. NVIDIA says which wheel JetPack $jetpack takes:"
    say "  $PAGE"
    read -r -p 'its file or URL, or none: ' torch
    check_torch
    return
  fi
  fail 4 "no torch for this GPU was found, and PyPI has none for a Jetson" \
    "--torch WHEEL, the one of $PAGE, or --torch none"
}

make_venv() {
  local args=()
  if [ "$torch" = system ]; then args+=(--system-site-packages); fi
  run "$python" -m venv ${args[@]+"${args[@]}"} "$venv"
  run "$venv/bin/python" -m pip install --upgrade pip
  case "$torch" in
    none | system) ;;
    *) run "$venv/bin/python" -m pip install -c "$here/constraints-jp$jetpack.txt" "$torch" ;;
  esac
}

# What must stay as it is goes into hold.txt: pip then fails rather than replace it.
hold() {
  local file=$venv/hold.txt
  if [ -n "$dry" ]; then
    echo "would hold torch, torchvision, torchaudio, triton and numpy as they are, in $file"
    return
  fi
  "$venv/bin/python" -m pip list --format=freeze |
    grep -E '^(torch|torchvision|torchaudio|triton|numpy)==' >"$file" || true
}

# ---- this program

choose_extras() {
  local wanted name
  [ -z "$extras" ] || return 0
  wanted='serve chat'
  if [ "$torch" != none ]; then wanted="convert $wanted"; fi
  for name in $wanted; do
    if grep -qE "^$name = \[" "$here/../pyproject.toml"; then extras=${extras:+$extras,}$name; fi
  done
}

install_program() {
  local before after
  before=$([ -n "$dry" ] || torch_of "$venv/bin/python")
  run "$venv/bin/python" -m pip install -c "$venv/hold.txt" -c "$here/constraints-jp$jetpack.txt" \
    "$here/..${extras:+[$extras]}"
  [ -z "$dry" ] || return 0
  after=$(torch_of "$venv/bin/python")
  [ "$before" = "$after" ] || fail 1 "torch was ${before:-not there} and is now ${after:-gone}" \
    "remove $venv and start again"
  if [ -n "$doctor" ]; then "$venv/bin/bitnest-edge" doctor >&2; fi
}

# ---- the service

# Before anything is installed: what a service could not be written for, not see or not read.
check_service() {
  local path user=bitnest closed
  if [ "$(id -u)" != 0 ] && [ -z "$root$dry" ]; then fail 4 "--service needs root" "sudo $0 …"; fi
  [ -f "$model/manifest.json" ] ||
    fail 2 "--service: expected the folder of a converted model, got $model" "bitnest-edge convert makes one"
  model=$(realpath -- "$model") venv=$(realpath -m -- "$venv")
  # what ProtectHome= and PrivateTmp= of the unit hide (systemd.exec)
  for path in "$venv" "$model" "$model"/*; do
    path=$(realpath -m -- "$path") # a shard may be a link
    case "${path#"$root"}/" in /home/* | /root/* | /run/user/* | /tmp/* | /var/tmp/*)
      fail 2 "--service: the unit hides /home, /root and /tmp from the service, and $path lies there" \
        "put it elsewhere, as into /srv" ;;
    esac
  done
  [ "$(id -u)" = 0 ] || return 0
  id "$user" >/dev/null 2>&1 || user=nobody # who may read as little
  # from a folder that every user may be in, which find wants
  closed=$(cd / && runuser -u "$user" -- find -L "$model" ! -readable -print -quit 2>&1) || true
  [ -z "$closed" ] || fail 2 "--service: its user cannot read the model: $closed" \
    "sudo chmod -R a+rX $model, and a+x for the folders above it"
}

install_service() {
  local unit=$root/etc/systemd/system/bitnest-edge.service settings=$root/etc/bitnest-edge/serve.env
  local groups='' group
  for group in video render; do # of the GPU's device files; a group that is not there fails a unit
    if grep -q "^$group:" "$root/etc/group" 2>/dev/null; then groups="${groups:+$groups }$group"; fi
  done
  if [ -n "$dry" ]; then
    echo "would write $unit and $settings: serves $model as user bitnest, groups ${groups:-none}"
    return
  fi
  if [ -z "$root" ] && ! id bitnest >/dev/null 2>&1; then
    useradd --system --no-create-home --shell /usr/sbin/nologin bitnest
  fi
  mkdir -p "$(dirname "$unit")" "$(dirname "$settings")"
  sed -e "s|/opt/bitnest-edge|$venv|g" -e "s|^SupplementaryGroups=.*|SupplementaryGroups=$groups|" \
    "$here/bitnest-edge.service" >"$unit"
  if [ ! -e "$settings" ]; then
    printf 'MODEL=%s\nOPTIONS=\n' "$model" >"$settings"
  elif ! grep -qxF "MODEL=$model" "$settings"; then # what was set is kept
    say "kept as it is, with another model than $model: $settings"
  fi
  if [ -z "$root" ]; then systemctl daemon-reload; fi
  say "written: $unit and $settings"
  say "start it: sudo systemctl enable --now bitnest-edge"
}

main() {
  parse "$@"
  if [ -z "$venv" ]; then
    if [ "$(id -u)" = 0 ]; then venv=/opt/bitnest-edge; else venv=$HOME/bitnest-edge; fi
  fi
  case "$venv" in /*) ;; *) venv=$PWD/$venv ;; esac
  check_path --venv "$venv"
  check_path --service "$model"
  if [ -n "$model" ]; then check_service; fi
  umask 022 # the service's user reads what root installs
  find_jetpack
  check_machine
  choose_torch
  choose_extras
  make_venv
  hold
  install_program
  if [ -n "$model" ]; then install_service; fi
  say "${dry:+dry run, nothing was changed: }$venv/bin/bitnest-edge"
}

main "$@"
