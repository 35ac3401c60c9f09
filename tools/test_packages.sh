#!/bin/sh
# Programs that tests need from the system, fetched if they can be: Chromium for the web page, nginx as a reverse proxy,
# PostgreSQL for several servers.
# Tests of what is missing are skipped.
as_root=""
[ "$(id -u)" = 0 ] || as_root="sudo -n"

fetch() {  # package, what for
    if command -v apt-get >/dev/null && { [ -z "$as_root" ] || $as_root true 2>/dev/null; }; then
        echo "fetching $1, for tests of $2"
        log=$(mktemp)
        { $as_root apt-get update -qq && $as_root apt-get install -y -qq --no-install-recommends "$1"; } >"$log" 2>&1 && return
        tail -n 3 "$log" >&2
    fi
    echo "no $1: tests of $2 will be skipped; install it, or name it with $3" >&2
}

PATH=$PATH:/usr/sbin  # where Debian has nginx
command -v chromium chromium-browser google-chrome >/dev/null || [ -n "$TOKENMILL_CHROMIUM" ] ||
    fetch chromium "the web page" TOKENMILL_CHROMIUM
command -v nginx >/dev/null || [ -n "$TOKENMILL_NGINX" ] || fetch nginx-light "a reverse proxy" TOKENMILL_NGINX
command -v postgres >/dev/null || ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || [ -n "$TOKENMILL_POSTGRES" ] ||
    fetch postgresql "several servers" TOKENMILL_POSTGRES
