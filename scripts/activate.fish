# scripts/activate for fish.

fish_add_path --global --path --move (dirname (realpath (status filename)))

function __muster_complete
    muster --complete (commandline -opc)[2..] (commandline -ct) 2>/dev/null
    or __fish_complete_path (commandline -ct)
end

complete --command muster --no-files --arguments '(__muster_complete)'
