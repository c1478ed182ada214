#!/bin/sh
# Makes the keys of deploy/compose.yaml once: make-keys SETTINGS FOLDER
#
# FOLDER gets a folder for each service, with only the files that this service needs:
#   broker   its key, and mlxpool.toml: SETTINGS with the public keys that may connect
#   worker   its key, and the broker's public key
#   gateway  the same, and the bearer key of HTTP clients
#   app      the key of a program that speaks ZeroMQ, and the broker's public key
set -eu
umask 077
settings=$1 folder=$2
made=$folder/broker/mlxpool.toml # written last
if [ -e "$made" ]; then
    echo "make-keys: the keys are in $folder already"
    exit 0
fi

rm -f "$folder"/*/*.key "$folder/broker/mlxpool.part"
mlxpool keygen broker --role server --folder "$folder/broker" >/dev/null
cp "$settings" "$folder/broker/mlxpool.part"
chmod 600 "$folder/broker/mlxpool.part"
for name in worker gateway app; do
    role=client
    [ "$name" = worker ] && role=worker
    {
        echo
        mlxpool keygen "$name" --role "$role" --folder "$folder/$name"
        [ "$name" != gateway ] || echo "may_name_owners = true"
    } >>"$folder/broker/mlxpool.part"
    sed -n 's/^public = "\(.*\)"/\1/p' "$folder/broker/broker.key" >"$folder/$name/broker.pub"
done
python -c 'import secrets; print(secrets.token_hex(32))' >"$folder/gateway/http.keys"
mv "$folder/broker/mlxpool.part" "$made"
echo "make-keys: made the keys in $folder"
