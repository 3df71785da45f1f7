#!/bin/sh
# `cloud-init status [--wait]` and `cloud-init clean [--logs]` of a virtual machine's host.
if [ "$1" = clean ]; then
  rm -rf /var/lib/cloud/instance /var/lib/cloud/seed
  case " $* " in *" --logs "*) rm -f /var/log/cloud-init.log /var/log/cloud-init-output.log ;; esac
  exit 0
fi
if [ "$1" != status ]; then
  echo "cloud-init: the stand-in knows status and clean alone" >&2
  exit 2
fi
case " $* " in
  *" --wait "*) while [ ! -e /run/cloud-init/result.json ]; do sleep 0.05; done ;;
esac
if [ ! -e /run/cloud-init/result.json ]; then
  echo "status: running"
elif [ -s /run/cloud-init/errors ]; then
  echo "status: error"
  cat /run/cloud-init/errors
  exit 1
else
  echo "status: done"
fi
