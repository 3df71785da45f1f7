#!/bin/bash
# Stands for the base image's program: makes the virtual machine, stays as long as it runs, and ends with it.
echo -e "\E[1;34m❯ \E[1;36mStarting Windows for Docker v0.00...\E[0m"
(exec -a qemu-system-x86_64 /usr/bin/python3 /guest/vm.py)
code=$?
[ $code = 0 ] && echo "❯ Shutdown completed!"
exit $code
