"""The names of the commands: none hides a program that shells, build files and hooks call."""

from __future__ import annotations

import tomli

from tests.conftest import ROOT

_COREUTILS = """
arch b2sum base32 base64 basename basenc cat chcon chgrp chmod chown chroot cksum comm cp csplit cut date dd df dir
dircolors dirname du echo env expand expr factor false fmt fold groups head hostid id install join kill link ln logname
ls md5sum mkdir mkfifo mknod mktemp mv nice nl nohup nproc numfmt od paste pathchk pinky pr printenv printf ptx pwd
readlink realpath rm rmdir runcon seq sha1sum sha224sum sha256sum sha384sum sha512sum shred shuf sleep sort split stat
stdbuf stty sum sync tac tail tee test timeout touch tr true truncate tsort tty uname unexpand uniq unlink uptime users
vdir wc who whoami yes [
"""
_PROCPS = """
free hugetop kill pgrep pidof pidwait pkill pmap ps pwdx skill slabtop snice sysctl tload top uptime vmstat w watch
"""
_UTIL_LINUX = """
addpart agetty blkdiscard blkid blkzone blockdev cal cfdisk chcpu chfn chmem choom chrt chsh col colcrt colrm column
ctrlaltdel delpart dmesg eject enosys exch fallocate fdisk fincore findfs findmnt flock fsck fsfreeze fstrim getopt
hardlink hexdump hwclock ionice ipcmk ipcrm ipcs isosize kill last ldattach line logger login look losetup lsblk lscpu
lsfd lsipc lsirq lslocks lslogins lsmem lsns mcookie mesg mkfs mkswap more mount mountpoint namei newgrp nologin nsenter
partx pg pipesz pivot_root prlimit raw readprofile rename renice reset resizepart rev rfkill rtcwake runuser script
scriptlive scriptreplay setarch setpriv setsid setterm sfdisk su sulogin swaplabel swapoff swapon switch_root taskset
tunelp uclampset ul umount unshare utmpdump uuidd uuidgen uuidparse vipw vigr waitpid wall wdctl whereis wipefs write
zramctl
"""
_SHELL = """
. : alias bg bind break builtin caller case cd command compgen complete compopt continue coproc declare dirs disown do
done echo elif else enable esac eval exec exit export false fc fg fi for function getopts hash help history if in jobs
kill let local logout mapfile popd printf pushd pwd read readarray readonly return select set shift shopt source suspend
test then time times trap true type typeset ulimit umask unalias unset until wait while
"""
_COMMON = """
apt ar as awk bash bc bzip2 c++ cargo cc clang cmake conda cpio cpp crontab curl dash dc diff docker dpkg ed emacs ex
file find fish ftp gcc gdb git go grep gunzip gzip hostname htop ifconfig ip java ld less locate lsof m4 make man nano
nc nm node npm objdump openssl passwd patch perl ping pip podman python python3 ranlib rpm rsync ruby scp screen sed
sftp sh size srun sbatch ssh strace strip sudo tar telnet tmux torchrun tree unzip uv vi vim wget which xargs
xz yum zip zsh zstd
"""
TAKEN = set(" ".join((_COREUTILS, _PROCPS, _UTIL_LINUX, _SHELL, _COMMON)).split())


def test_no_command_has_the_name_of_another_program() -> None:
    """A script in the environment's `bin` comes before the system's, for everything that runs in it."""
    scripts = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert len(scripts) >= 9
    assert not scripts.keys() & TAKEN
    assert {"rm", "kill", "test", "sort"} <= TAKEN, "the lists are read as lists"
