#!/bin/sh
# Process 1 of a virtual machine's host: what cloud-init and systemd do on a real one, as far as we use it.
exec </dev/null
seed=/var/lib/cloud/seed
output=/var/log/cloud-init-output.log
mkdir -p /run/sshd /run/lock /run/cloud-init /var/lib/cloud/instance
chmod 1777 /run/lock

run() {
  # the serial console sees it, too, and the exit code is the program's
  echo "cloud-init: running $1" | tee -a "$output" >&2
  { "$1" 2>&1; echo $? > "/run/cloud-init/$2.code"; } | tee -a "$output" >&2
  code=$(cat "/run/cloud-init/$2.code")
  [ "$code" = 0 ] || {
    echo "cloud-init: $1 failed with exit code $code" | tee -a "$output" >&2
    echo "$2 failed with exit code $code" >> /run/cloud-init/errors
  }
}

# as cloud-init keeps its account: /run/cloud-init/status.json, replaced whole at each stage
begun=$(date +%s.%N)
status() {
  ended=$1
  final="{\"errors\": [], \"finished\": $ended, \"start\": $begun}"
  early="{\"errors\": [], \"finished\": $begun, \"start\": $begun}"
  stage="\"modules-final\""
  [ "$ended" = null ] || stage=null
  printf '{"v1": {"datasource": "DataSourceCloud", "init-local": %s, "init": %s, "modules-config": %s, "modules-final": %s, "stage": %s}}\n' \
    "$early" "$early" "$early" "$final" "$stage" > /run/cloud-init/status.part
  mv /run/cloud-init/status.part /run/cloud-init/status.json
}
status null

echo "Linux boots on the stand-in" >&2
cat /var/log/cloud-init.log >&2
[ -x "$seed/bootcmd" ] && run "$seed/bootcmd" bootcmd

final() {
  if [ ! -e /var/lib/cloud/instance/boot-finished ]; then
    [ -x "$seed/runcmd" ] && run "$seed/runcmd" runcmd
    [ -x "$seed/script" ] && run "$seed/script" script
    date -u +%FT%TZ > /var/lib/cloud/instance/boot-finished
  fi
  errors=$(sed 's/.*/"&"/' /run/cloud-init/errors 2>/dev/null | paste -sd, -)
  echo "{\"v1\": {\"datasource\": \"DataSourceCloud\", \"errors\": [$errors]}}" > /run/cloud-init/result.part
  status "$(date +%s.%N)"
  mv /run/cloud-init/result.part /run/cloud-init/result.json
  echo "cloud-init: finished" >&2
}
final &
[ -x /etc/rc.local ] && /etc/rc.local </dev/null >/dev/null 2>&1 &

while :; do
  /usr/sbin/sshd -D -e -f /etc/ssh/sshd_config
  sleep 0.05
done
