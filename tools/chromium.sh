#!/bin/sh
# A browser for the tests of the web page: the system's Chromium, fetched if it can be. Without one those tests are skipped.
command -v chromium chromium-browser google-chrome >/dev/null && exit 0
[ -n "$TOKENMILL_CHROMIUM" ] && exit 0
as_root=""
[ "$(id -u)" = 0 ] || as_root="sudo -n"
if command -v apt-get >/dev/null && { [ -z "$as_root" ] || $as_root true 2>/dev/null; }; then
    echo "fetching Chromium, for tests of the web page"
    log=$(mktemp)
    { $as_root apt-get update -qq && $as_root apt-get install -y -qq --no-install-recommends chromium; } >"$log" 2>&1 && exit 0
    tail -n 3 "$log" >&2
fi
echo "no Chromium: tests of the web page will be skipped; install one, or name it with TOKENMILL_CHROMIUM" >&2
