#!/bin/bash
# Runs the client over everything. Wipes the results first, unless told not to.
clean_results=true result_dir=./results flags=()
while [ $# -gt 0 ]; do
  case $1 in
    --clean-results) clean_results=$2; shift 2 ;;
    --result-dir) result_dir=$2; flags+=(--result_dir "$2"); shift 2 ;;
    --json-name) flags+=(--test_all_meta_path "$2"); shift 2 ;;
    --agent | --model | --som-origin | --a11y-backend | --worker-id | --num-workers | --diff-lvl)
      name=${1#--}; flags+=("--${name//-/_}" "$2"); shift 2 ;;
    *) sleep 1 ;;
  esac
done
cd /client || exit
[ "$clean_results" = true ] && rm -rf "$result_dir"/*
python run.py "${flags[@]}"
