#!/bin/sh
# Boots a host, in two stages: as a process of this machine it joins the host's control groups and makes its
# namespaces; as their process 1 it mounts, waits for its cable and becomes the host's init.
#   boot.sh launch HOST-DIRECTORY NAME CGROUP.PROCS...
#   boot.sh inside HOST-DIRECTORY NAME
set -eu
stage=$1 dir=$2 name=$3
shift 3

if [ "$stage" = launch ]; then
  # before the namespaces are made: a host sees its own group as the topmost
  for procs; do echo 0 > "$procs"; done
  exec unshare --pid --mount --uts --ipc --net --cgroup --fork --kill-child \
    /bin/sh "$0" inside "$dir" "$name"
fi

echo "$name" > /proc/sys/kernel/hostname
# the multicast and router traffic of some hundred hosts would drown the rest
for f in all default; do echo 1 > /proc/sys/net/ipv6/conf/$f/disable_ipv6; done 2>/dev/null || :
mount --all --fstab "$dir/fstab"
# end of file: the lab is gone
read -r _plugged || exit 1
ip -batch "$dir/net"
cd "$dir/root"
# the old root lands on top of the new one, and is taken off: no directory for it needed
pivot_root . .
umount -l .
cd /
unset OLDPWD
# A host's root may do what it likes to the host, but the clock, the modules, the disks and the mounts are the
# machine's (dac_read_search: opens files by number, also such as are not in sight).
exec setpriv --bounding-set \
  -sys_admin,-mknod,-dac_read_search,-sys_module,-sys_rawio,-sys_time,-syslog,-mac_admin,-mac_override,-wake_alarm \
  /bin/sh /sbin/lab-init
